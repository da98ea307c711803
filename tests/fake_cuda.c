/* A CUDA driver without a GPU: it loads nothing and launches nothing, and remembers each launch's parameters. */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MOST_KERNELS = 1024, MOST_PARAMETERS = 128, MOST_LAUNCHES = 64 };

typedef struct {
  char name[256];
  int count, sizes[MOST_PARAMETERS];
} Kernel;

typedef struct {
  int64_t kernel, stream, grid[3], pdl, count;
  uint64_t parameters[MOST_PARAMETERS];
} Launch;

Kernel fake_kernels[MOST_KERNELS];
Launch fake_launches[MOST_LAUNCHES];
int fake_kernel_count, fake_launch_count, fake_encodings;

/* Say which parameters a kernel has; the last kernel of a name counts. */
int fake_declare(const char *name, int count, const int *sizes) {
  if (fake_kernel_count == MOST_KERNELS || count > MOST_PARAMETERS)
    return -1;
  Kernel *kernel = &fake_kernels[fake_kernel_count];
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  kernel->count = count;
  memcpy(kernel->sizes, sizes, count * sizeof *sizes);
  return fake_kernel_count++;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  Kernel *kernel = (Kernel *)function;
  Launch *launch = &fake_launches[__atomic_fetch_add(&fake_launch_count, 1, __ATOMIC_SEQ_CST) % MOST_LAUNCHES];
  memset(launch, 0, sizeof *launch);
  launch->kernel = kernel - fake_kernels;
  launch->stream = (int64_t)config->hStream;
  launch->grid[0] = config->gridDimX, launch->grid[1] = config->gridDimY, launch->grid[2] = config->gridDimZ;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    launch->pdl |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  launch->count = kernel->count;
  for (int i = 0; i < kernel->count; ++i)
    memcpy(&launch->parameters[i], parameters[i], kernel->sizes[i] < 8 ? kernel->sizes[i] : 8);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  for (int i = fake_kernel_count - 1; i >= 0; --i)
    if (strcmp(fake_kernels[i].name, name) == 0) {
      *function = (CUfunction)&fake_kernels[i];
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}

/* An encoded map begins with the address that it was made of. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  memcpy(map, &address, sizeof address);
  ++fake_encodings;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 227 * 1024;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

#define NOTHING(name) CUresult name(void) { return CUDA_SUCCESS; }
