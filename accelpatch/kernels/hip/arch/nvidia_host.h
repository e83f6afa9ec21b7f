// Limits of the device, and launches. Part of nvidia.h.
#pragma once
#include <atomic>

struct DeviceLimits {
    int sms, shared_block, shared_sm;
    bool dependent_launch, clusters;
};
inline int attribute(cudaDeviceAttr what, int device) {
    int v = 0;
    (void)cudaDeviceGetAttribute(&v, what, device);
    return v;
}
inline DeviceLimits device_limits() {
    int device = 0;
    (void)cudaGetDevice(&device);
    const bool hopper = attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
    return {attribute(cudaDevAttrMultiProcessorCount, device),
        attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), hopper, hopper && CLUSTER > 1};
}
template <class... ARGS> int prepare(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_block);
    return error ? error
                 : cudaFuncSetAttribute(
                       kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}
inline cudaLaunchAttribute cluster_attribute(int cluster) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}
// How many clusters run on the device at once, with one block on an SM; 0 where the runtime does not know. The runtime
// is asked once a device.
template <class... ARGS> int most_clusters(void (*kernel)(ARGS...), const DeviceLimits& limits) {
    static std::atomic<int> known[64];
    int device = 0, count = 0;
    if (cudaGetDevice(&device) || device >= 64) return 0;
    if ((count = known[device])) return count;
    if (prepare(kernel, limits)) return 0;
    cudaLaunchAttribute attribute = cluster_attribute(CLUSTER);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER), config.blockDim = dim3(WARP_SIZE), config.dynamicSmemBytes = limits.shared_block;
    config.attrs = &attribute, config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config)) return 0;
    return known[device] = count;
}
inline void clear(int32_t* number, GpuStream stream) { (void)cudaMemsetAsync(number, 0, sizeof(*number), stream); }
// The runtime's error, 0 for none. cluster: blocks of one.
template <class... ARGS>
int launch_clusters(void (*kernel)(ARGS...), int cluster, int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    if (const int error = prepare(kernel, limits)) return error;
    cudaLaunchAttribute attributes[2] = {cluster_attribute(cluster), {}};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const bool overlapped = dependent && limits.dependent_launch;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared,
    config.stream = stream;
    config.attrs = attributes + (cluster > 1 ? 0 : 1), config.numAttrs = (cluster > 1) + overlapped;
    return cudaLaunchKernelEx(&config, kernel, args...);
}
template <class... ARGS>
int launch_kernel(void (*kernel)(ARGS...), int blocks, int threads, int shared, GpuStream stream,
    const DeviceLimits& limits, bool dependent, ARGS... args) {
    return launch_clusters(kernel, 1, blocks, threads, shared, stream, limits, dependent, args...);
}
