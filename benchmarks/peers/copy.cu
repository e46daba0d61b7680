// Device-to-device copies in two ways, and what a caller of these peers needs of the CUDA runtime.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // independent 16-byte loads that a thread has in flight

__global__ void copy_vectors(const uint4* __restrict__ source, uint4* __restrict__ target, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  uint4 vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads < count) vectors[i] = source[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads < count) target[first + i * kThreads] = vectors[i];
  }
}

}  // namespace

// `bytes` is a multiple of 16.
extern "C" int copy_by_kernel(const void* source, void* target, int64_t bytes) {
  const int64_t count = bytes / sizeof(uint4), a_block = kThreads * kVectors;
  copy_vectors<<<(count + a_block - 1) / a_block, kThreads>>>(static_cast<const uint4*>(source),
                                                              static_cast<uint4*>(target), count);
  return cudaGetLastError();
}

// Mean time of `calls` copies one after the other, which rotate through `rotation` neighbouring ranges of `bytes`.
extern "C" int time_memcpy(const char* source, char* target, int64_t bytes, int rotation, int calls, float* seconds) {
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  // A copy that is not timed keeps the device busy while the timed ones are enqueued.
  cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice);
  cudaEventRecord(start);
  for (int i = 0; i < calls; ++i) {
    const int64_t offset = i % rotation * bytes;
    cudaMemcpyAsync(target + offset, source + offset, bytes, cudaMemcpyDeviceToDevice);
  }
  cudaEventRecord(stop);
  cudaEventSynchronize(stop);
  float milliseconds = 0;
  cudaEventElapsedTime(&milliseconds, start, stop);
  *seconds = milliseconds / 1e3f / calls;
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return cudaGetLastError();
}

extern "C" int synchronize() { return cudaDeviceSynchronize(); }

extern "C" const char* error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
