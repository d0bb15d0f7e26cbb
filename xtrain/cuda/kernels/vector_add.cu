// c = a + b for n fp32 elements: the smallest CUDA C++ kernel, twin of the Numba one.

extern "C" __global__ void vector_add(const float* a, const float* b, float* c, long long n) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
