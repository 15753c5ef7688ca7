"""Lines from pieces; whole lines on pipes, an unfinished one on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading

import pytest

from gpucoll.launcher import output
from gpucoll.launcher.output import LineAssembler, PrintedOutput

WAIT_S = 20.0


class TestLineAssembler:
    @pytest.mark.parametrize(
        ("pieces", "lines", "unfinished"),
        [
            ([b"one\ntwo\nthree"], [b"one", b"two"], b"three"),
            ([b"o", b"n", b"e", b"\n"], [b"one"], b""),
            ([b"\n\n"], [b"", b""], b""),
            ([b"dos\r\nlines\r\n"], [b"dos", b"lines"], b""),
            ([b"dos\r", b"\nlines\r", b"\n"], [b"dos", b"lines"], b""),
            ([b"\r 10%", b"\r 20%", b"\r100%\n"], [b"100%"], b""),
            ([b" 10%\r", b" 20%\r"], [], b" 20%"),
            ([b" 10%\r", b" 20%\r", b"\n"], [b" 20%"], b""),
            ([b" 10%\r", b"done\nnext"], [b"done"], b"next"),
            ([b"\xe4\xb8", b"\xad\n"], ["中".encode()], b""),
        ],
    )
    def test_lines(self, pieces, lines, unfinished):
        assembler = LineAssembler()
        assert [line for piece in pieces for line in assembler.feed(piece)] == lines
        assert assembler.unfinished == unfinished
        assert assembler.finish() == ([unfinished] if unfinished else [])
        assert assembler.finish() == []

    def test_a_progress_bar_takes_no_memory(self):
        assembler = LineAssembler()
        for step in range(10000):
            assert assembler.feed(b"\r%5d of 10000" % step) == []
        assert len(assembler._pending) < 100

    def test_a_line_without_end_is_broken(self, monkeypatch):
        monkeypatch.setattr(output, "LONGEST_LINE_BYTES", 10)
        assembler = LineAssembler()
        assert assembler.feed(b"0123456789") == []
        assert assembler.feed(b"ab") == [b"0123456789ab"]
        assert assembler.feed(b"cd\n") == [b"cd"]


class TestPrintedOutput:
    def test_goes_to_the_streams_of_the_moment(self, monkeypatch):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        printed = PrintedOutput(2, prefix=False)
        printed.feed(0, 1, b"one\nha")
        printed.feed(1, 1, b"two\n")
        printed.feed(0, 1, b"lf")
        printed.feed(0, 2, b"bad\n")
        printed.feed(0, 1, b"")
        assert out.getvalue() == "one\ntwo\nhalf\n"
        assert err.getvalue() == "bad\n"

    def test_each_line_begins_with_its_rank(self, capsys):
        printed = PrintedOutput(2, prefix=True)
        printed.feed(1, 1, b"one\nha")
        printed.feed(0, 2, b"two\n")
        printed.feed(1, 1, b"lf\n")
        assert capsys.readouterr() == ("[1] one\n[1] half\n", "[0] two\n")

    def test_a_stream_that_cannot_write_a_character(self, monkeypatch):
        binary = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(binary, encoding="ascii"))
        PrintedOutput(1, prefix=False).feed(0, 1, "é\n".encode())
        assert binary.getvalue() == b"\\xe9\n"

    def test_no_stream_at_all(self, monkeypatch):
        monkeypatch.setattr(sys, "stdout", None)
        PrintedOutput(1, prefix=False).feed(0, 1, b"nobody hears\n")


def test_write_all_to_a_full_pipe_that_does_not_block():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    data = os.urandom(1 << 20)
    received = []
    with open(read_end, "rb") as pipe:
        reader = threading.Thread(target=lambda: received.append(pipe.read()))
        reader.start()
        output.write_all(write_end, data)
        os.close(write_end)
        reader.join()
    assert received == [data]


class TestCommandLine:
    def test_each_line_has_its_rank_and_keeps_its_stream(self, run, script):
        program = script("print('out', rank); print('err', rank, file=sys.stderr)")
        code, out, err = run("-n", 3, program)
        assert code == 0
        assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
        assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]

    def test_no_prefix(self, run):
        assert run("-n", 2, "--no-prefix", "echo", "same") == (0, "same\nsame\n", "")

    def test_a_last_line_without_end_is_shown(self, run):
        code, out, _ = run("-n", 2, "printf", "no end")
        assert (code, sorted(out.splitlines(keepends=True))) == (
            0,
            ["[0] no end\n", "[1] no end\n"],
        )

    def test_lines_stay_whole(self, run, script):
        # Written in pieces with system calls of their own, from three ranks at the same time.
        program = script(
            "for line in range(1000):\n"
            "    for piece in (b'<', b'%d' % rank * 50, b'>', b'\\n'):\n"
            "        os.write(1 + line % 2, piece)\n"
        )
        code, out, err = run("-n", 3, program)
        assert code == 0
        expected = [f"[{rank}] <{str(rank) * 50}>" for rank in range(3) for _ in range(500)]
        assert sorted(out.splitlines()) == expected
        assert sorted(err.splitlines()) == expected

    def test_much_output_at_once_arrives_whole(self, run, script):
        program = script("os.write(1, b'x' * 3_000_000 + b'\\n')")
        code, out, _ = run("-n", 2, "--no-prefix", program)
        assert code == 0
        assert out.count("x") == 6_000_000

    def test_standard_input_goes_to_rank_0(self, start_run, script):
        program = script("print(sys.stdin.read().split())")
        running = start_run("-n", 2, program, stdin=-1)
        running.process.stdin.write(b"some words\n")
        running.process.stdin.close()
        running.process.stdin = None
        _, out, _ = running.finish()
        assert sorted(out.splitlines()) == ["[0] ['some', 'words']", "[1] []"]

    def test_standard_input_may_be_closed(self, start, script):
        program = script("print(repr(sys.stdin.read()))")
        run = "import os, sys; os.close(0); from gpucoll.launcher import cli; "
        run += "cli.compile_kernels = lambda report: None; sys.exit(cli.main())"
        code, out, _ = start([sys.executable, "-c", run, "-n", 1, program]).finish()
        assert (code, out) == (0, "[0] ''\n")

    def test_a_reader_that_goes_away_ends_the_job(self, start_run):
        running = start_run("-n", 2, "yes")
        running.wait_for("] y\n")
        running.process.stdout.close()
        running.process.stdout = None
        code, _, err = running.finish()
        assert code == 128 + 13
        assert "was killed by SIGPIPE" in err

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_a_full_disk_ends_the_job(self, run, script, stream):
        program = script(f"print('text', file=sys.{stream}, flush=True)\ntime.sleep(60)\n")
        with open("/dev/full", "wb") as full:
            code, _, err = run("-n", 2, "--grace", 10, program, **{stream: full})
        assert code == 1
        if stream == "stdout":
            assert "gpucoll-run: cannot write what the ranks print to stdout: No space left" in err
            assert "ending all ranks\n" in err

    def test_the_last_line_on_a_full_disk(self, run):
        with open("/dev/full", "wb") as full:
            code, _, err = run("-n", 1, "printf", "no end", stdout=full)
        assert code == 1
        assert "to stdout: No space left on device" in err
        assert "Traceback" not in err

    def test_a_reader_that_has_gone_before_the_last_line(self, run):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as pipe:
            code, _, err = run("-n", 1, "printf", "no end", stdout=pipe)
        assert (code, err) == (128 + 13, "")


class Terminal:
    """A pseudo-terminal with gpucoll-run's three standard streams on it."""

    def __init__(self):
        self.master, self.slave = os.openpty()

    def close(self):
        for descriptor in (self.master, self.slave):
            os.close(descriptor)


@pytest.fixture
def terminal():
    pair = Terminal()
    yield pair
    pair.close()


def read_until(descriptor, *texts, seen=b""):
    """Read until all texts have come, in any order."""
    while not all(text in seen for text in texts):
        assert select.select([descriptor], [], [], WAIT_S)[0], seen
        seen += os.read(descriptor, 4096)
    return seen


class TestTerminal:
    def start(self, start_run, terminal, program):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
        return start_run("-n", 2, program, env={**os.environ, "TERM": "xterm"}, **streams)

    def test_a_prompt_shows_and_can_be_answered(self, start_run, terminal, script):
        program = script("if rank == 0: print('got', input('name? '))")
        running = self.start(start_run, terminal, program)
        read_until(terminal.master, b"[0] name? ")
        os.write(terminal.master, b"Ada\n")
        read_until(terminal.master, b"\r\x1b[K[0] name? got Ada\r\n")
        assert running.finish()[0] == 0

    def test_a_progress_bar_is_redrawn_and_wiped(self, start_run, terminal, script):
        program = script(
            "if rank == 0:\n"
            "    print('\\r 50%', end='', file=sys.stderr)\n"
            "    input()\n"
            "    print('\\r100%', file=sys.stderr)\n"
            "print('bye')\n"
        )
        running = self.start(start_run, terminal, program)
        seen = read_until(terminal.master, b"[0]  50%")
        os.write(terminal.master, b"\n")
        seen = read_until(terminal.master, b"[0] bye\r\n", b"[1] bye\r\n", seen=seen)
        assert running.finish()[0] == 0
        # Wiped before anything else was written, or left behind by the echo of the answer.
        assert not re.search(rb"50%(?!\r\x1b\[K|\r\n)", seen)
        lines = seen.replace(b"\r\x1b[K", b"").replace(b"[0]  50%", b"").split(b"\r\n")
        assert sorted(line for line in lines if line) == [b"[0] 100%", b"[0] bye", b"[1] bye"]
