/* The other libraries that mori links, as a machine without any AMD device has them: HIP, HSA, ROCm SMI, libpci and libdrm that
 * find nothing. mori's RDMA over host memory asks them for topology only. One object under all their names.
 */
#include <stdint.h>
#include <stdlib.h>

enum { HIP_NO_DEVICE = 100, HSA_ERROR = 0x1000 };
#define HIP(name) \
    int name(void) { return HIP_NO_DEVICE; }
#define HSA(name) \
    int name(void) { return HSA_ERROR; }

/* HIP calls a machine without a device an error here, and mori would end the process */
int hipGetDeviceCount(int *count) { return *count = 0, 0; }
const char *hipGetErrorString(int code) {
    (void)code;
    return "no ROCm-capable device is detected";
}
HIP(hipDeviceCanAccessPeer) HIP(hipDeviceEnablePeerAccess) HIP(hipDeviceGetAttribute) HIP(hipDeviceGetPCIBusId)
HIP(hipDeviceSynchronize) HIP(hipEventCreateWithFlags) HIP(hipEventDestroy) HIP(hipEventQuery) HIP(hipEventRecord)
HIP(hipEventSynchronize) HIP(hipExtMallocWithFlags) HIP(hipFree) HIP(hipGetDevice) HIP(hipGetLastError)
HIP(hipHostGetDevicePointer) HIP(hipHostRegister) HIP(hipHostUnregister) HIP(hipIpcCloseMemHandle) HIP(hipIpcGetMemHandle)
HIP(hipIpcOpenMemHandle) HIP(hipMalloc) HIP(hipMemAddressFree) HIP(hipMemAddressReserve) HIP(hipMemCreate)
HIP(hipMemExportToShareableHandle) HIP(hipMemGetAddressRange) HIP(hipMemGetAllocationGranularity)
HIP(hipMemGetHandleForAddressRange) HIP(hipMemImportFromShareableHandle) HIP(hipMemMap) HIP(hipMemRelease)
HIP(hipMemRetainAllocationHandle) HIP(hipMemSetAccess) HIP(hipMemUnmap) HIP(hipMemcpy) HIP(hipMemcpyAsync)
HIP(hipMemcpyPeerAsync) HIP(hipMemset) HIP(hipModuleGetFunction) HIP(hipModuleLaunchKernel) HIP(hipModuleLoad)
HIP(hipModuleUnload) HIP(hipPointerGetAttributes) HIP(hipRuntimeGetVersion) HIP(hipSetDevice) HIP(hipStreamCreateWithFlags)
HIP(hipStreamDestroy)

HSA(hsa_agent_get_info) HSA(hsa_amd_agent_iterate_memory_pools) HSA(hsa_amd_memory_lock_to_pool)
HSA(hsa_amd_memory_pool_get_info) HSA(hsa_amd_portable_export_dmabuf) HSA(hsa_init) HSA(hsa_iterate_agents) HSA(hsa_shut_down)
HSA(hsa_status_string)

/* mori ends the process where ROCm SMI counts no GPU: it counts one here, which HIP doesn't have */
int rsmi_init(uint64_t flags) { return (void)flags, 0; }
int rsmi_shut_down(void) { return 0; }
int rsmi_num_monitor_devices(uint32_t *count) { return *count = 1, 0; }
int rsmi_dev_pci_id_get(uint32_t device, uint64_t *id) { return (void)device, *id = 0x100, 0; } /* 0000:01:00.0 */
int rsmi_is_P2P_accessible(uint32_t one, uint32_t other, _Bool *yes) { return (void)one, (void)other, *yes = 0, 1; }
int rsmi_topo_get_link_type(uint32_t one, uint32_t other, uint64_t *hops, int *type) {
    return (void)one, (void)other, *hops = 0, *type = 0, 1;
}
int rsmi_topo_get_link_weight(uint32_t one, uint32_t other, uint64_t *weight) { return (void)one, (void)other, *weight = 0, 1; }
int rsmi_status_string(int status, const char **text) { return (void)status, *text = "no device", 0; }

/* a PCI bus with nothing on it: mori goes through the list of devices, which starts in this struct and is empty */
void *pci_alloc(void) { return calloc(1, 8192); }
void pci_init(void *bus) { (void)bus; }
void pci_scan_bus(void *bus) { (void)bus; }
void pci_cleanup(void *bus) { free(bus); }
int pci_fill_info(void *device, int what) { return (void)device, (void)what, 0; }
uint8_t pci_read_byte(void *device, int at) { return (void)device, (void)at, (uint8_t)0; }

int drmOpenRender(int minor) { return (void)minor, -1; }
int drmClose(int file) { return (void)file, -1; }
int amdgpu_device_initialize(void) { return -1; }
int amdgpu_device_deinitialize(void) { return -1; }
int amdgpu_query_gpu_info(void) { return -1; }
const char *amdgpu_get_marketing_name(void) { return 0; }
