/* A double of what MPIs say of GPUs, and of nothing else of theirs.
 *
 * -DCUDA_SUPPORT=1, -DROCM_SUPPORT=0, -DHIP_SUPPORT=1: what the function of that name says; without
 * one of them there is no such function, as in an MPI that does not know it.
 */
#include "double.h"

DOUBLE_API int mpi_double(void)
{
    return 1;
}

#ifdef CUDA_SUPPORT
DOUBLE_API int MPIX_Query_cuda_support(void)
{
    return CUDA_SUPPORT;
}
#endif

#ifdef ROCM_SUPPORT
DOUBLE_API int MPIX_Query_rocm_support(void)
{
    return ROCM_SUPPORT;
}
#endif

#ifdef HIP_SUPPORT
DOUBLE_API int MPIX_Query_hip_support(void)
{
    return HIP_SUPPORT;
}
#endif
