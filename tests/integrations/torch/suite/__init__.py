"""PyTorch's own tests of `torch.distributed`, from the installed wheel, against a backend by name.

    python -m tests.integrations.torch.suite --backend gpucoll --ranks 2 --beside gloo

from the root of the checkout. Nothing of PyTorch's is copied: `opened` loads its module so that no
test is closed to a backend because of its name, `cases` says how ranks are started, `running`
counts, and `not_passing` lists what does not pass, with the reason.
"""
