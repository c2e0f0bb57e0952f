// `mori.cpp` for any CPython: the module that the wheel's own Python layer calls, over the wheel's own libmori_io.so. The wheel's
// binding fits two versions of CPython only, and needs far more of ROCm. Names and signatures are those that mori's Python layer
// uses (ROCm/mori, MIT licence); compiled against the headers in the wheel.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "mori/io/backend.hpp"
#include "mori/io/common.hpp"
#include "mori/io/engine.hpp"
#include "mori/io/enum.hpp"

namespace py = pybind11;
using namespace mori::io;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <class Description>
static void travels(py::class_<Description>& type) {
  type.def(py::self == py::self);
  type.def("pack", [](const Description& self) {
    msgpack::sbuffer buffer;
    msgpack::pack(buffer, self);
    return py::bytes(buffer.data(), buffer.size());
  });
  type.def_static("unpack", [](const py::bytes& data) {
    std::string_view view = data;
    return msgpack::unpack(view.data(), view.size()).get().as<Description>();
  });
}

static void add_enums(py::module_& m) {
  py::enum_<BackendType>(m, "BackendType")
      .value("Unknown", BackendType::Unknown)
      .value("XGMI", BackendType::XGMI)
      .value("RDMA", BackendType::RDMA)
      .value("TCP", BackendType::TCP)
#ifdef MORI_HAS_FABRIC
      .value("FABRIC", BackendType::FABRIC)
#endif
      .export_values();
  py::enum_<MemoryLocationType>(m, "MemoryLocationType")
      .value("Unknown", MemoryLocationType::Unknown)
      .value("CPU", MemoryLocationType::CPU)
      .value("GPU", MemoryLocationType::GPU)
      .export_values();
  py::enum_<StatusCode>(m, "StatusCode")
      .value("SUCCESS", StatusCode::SUCCESS)
      .value("INIT", StatusCode::INIT)
      .value("IN_PROGRESS", StatusCode::IN_PROGRESS)
      .value("ERR_INVALID_ARGS", StatusCode::ERR_INVALID_ARGS)
      .value("ERR_NOT_FOUND", StatusCode::ERR_NOT_FOUND)
      .value("ERR_RDMA_OP", StatusCode::ERR_RDMA_OP)
      .value("ERR_BAD_STATE", StatusCode::ERR_BAD_STATE)
      .value("ERR_GPU_OP", StatusCode::ERR_GPU_OP)
      .export_values();
  py::enum_<PollCqMode>(m, "PollCqMode").value("POLLING", PollCqMode::POLLING).value("EVENT", PollCqMode::EVENT);
}

static void add_settings(py::module_& m) {
  py::class_<BackendConfig>(m, "BackendConfig");
  py::class_<RdmaBackendConfig, BackendConfig>(m, "RdmaBackendConfig")
      .def(py::init<int, int, int, PollCqMode, bool>(), py::arg("qp_per_transfer") = 1, py::arg("post_batch_size") = -1,
           py::arg("num_worker_threads") = -1, py::arg("poll_cq_mode") = PollCqMode::POLLING,
           py::arg("enable_notification") = true);
  py::class_<XgmiBackendConfig, BackendConfig>(m, "XgmiBackendConfig")
      .def(py::init<int, int>(), py::arg("num_streams") = 64, py::arg("num_events") = 64);
  py::class_<IOEngineConfig>(m, "IOEngineConfig")
      .def(py::init<std::string, uint16_t>(), py::arg("host") = "", py::arg("port") = 0)
      .def_readwrite("host", &IOEngineConfig::host)
      .def_readwrite("port", &IOEngineConfig::port);
}

static void add_descriptions(py::module_& m) {
  py::class_<EngineDesc> engine(m, "EngineDesc");
  engine.def_readonly("key", &EngineDesc::key)
      .def_readonly("hostname", &EngineDesc::hostname)
      .def_readonly("host", &EngineDesc::host)
      .def_readonly("port", &EngineDesc::port);
  travels(engine);
  py::class_<MemoryDesc> memory(m, "MemoryDesc");
  memory.def(py::init<>())
      .def_readonly("engine_key", &MemoryDesc::engineKey)
      .def_readonly("id", &MemoryDesc::id)
      .def_readonly("device_id", &MemoryDesc::deviceId)
      .def_readonly("data", &MemoryDesc::data)
      .def_readonly("size", &MemoryDesc::size)
      .def_readonly("loc", &MemoryDesc::loc);
  travels(memory);
}

static void add_status(py::module_& m) {
  py::class_<TransferStatus>(m, "TransferStatus")
      .def(py::init<>())
      .def("Code", &TransferStatus::Code)
      .def("Message", &TransferStatus::Message)
      .def("Init", &TransferStatus::Init)
      .def("InProgress", &TransferStatus::InProgress)
      .def("Succeeded", &TransferStatus::Succeeded)
      .def("Failed", &TransferStatus::Failed)
      .def("Update", &TransferStatus::Update)
      .def("SetCode", &TransferStatus::SetCode)
      .def("SetMessage", &TransferStatus::SetMessage)
      .def("Wait", &TransferStatus::Wait, Unlocked());
}

static void add_engine(py::module_& m) {
  py::class_<IOEngineSession>(m, "IOEngineSession")
      .def("AllocateTransferUniqueId", &IOEngineSession::AllocateTransferUniqueId, Unlocked())
      .def("Read", &IOEngineSession::Read, Unlocked())
      .def("Write", &IOEngineSession::Write, Unlocked())
      .def("BatchRead", &IOEngineSession::BatchRead, Unlocked())
      .def("BatchWrite", &IOEngineSession::BatchWrite, Unlocked())
      .def("Alive", &IOEngineSession::Alive);
  py::class_<IOEngine> engine(m, "IOEngine");
  engine.def(py::init<const EngineKey&, const IOEngineConfig&>())
      .def("GetEngineDesc", &IOEngine::GetEngineDesc)
      .def("CreateBackend", &IOEngine::CreateBackend)
      .def("RemoveBackend", &IOEngine::RemoveBackend)
      .def("RegisterRemoteEngine", &IOEngine::RegisterRemoteEngine)
      .def("DeregisterRemoteEngine", &IOEngine::DeregisterRemoteEngine)
      .def("RegisterMemory", [](IOEngine& self, py::capsule memory, size_t bytes, int device,
                                MemoryLocationType where) { return self.RegisterMemory(memory.get_pointer(), bytes, device, where); })
      .def("DeregisterMemory", &IOEngine::DeregisterMemory)
      .def("AllocateTransferUniqueId", &IOEngine::AllocateTransferUniqueId, Unlocked())
      .def("Read", &IOEngine::Read, Unlocked())
      .def("Write", &IOEngine::Write, Unlocked())
      .def("CreateSession", &IOEngine::CreateSession)
      .def("PopInboundTransferStatus", &IOEngine::PopInboundTransferStatus, Unlocked());
#ifdef MORI_HAS_WAIT_ALL
  engine.def("WaitAll", &IOEngine::WaitAll, py::arg("statuses"), py::arg("timeout_ms") = -1, Unlocked());
#endif
#ifdef MORI_HAS_PEER_FAILURE
  py::enum_<PeerFailureReason>(m, "PeerFailureReason")
      .value("UNKNOWN", PeerFailureReason::UNKNOWN)
      .value("PEER_UNREACHABLE", PeerFailureReason::PEER_UNREACHABLE);
  py::class_<PeerFailureEvent>(m, "PeerFailureEvent")
      .def_readonly("reason", &PeerFailureEvent::reason)
      .def_readonly("remote_engine_key", &PeerFailureEvent::remoteEngineKey)
      .def_readonly("detail", &PeerFailureEvent::detail);
  engine.def("PopPeerFailure", [](IOEngine& self) -> std::optional<PeerFailureEvent> {
    PeerFailureEvent failure;
    return self.PopPeerFailure(&failure) ? std::make_optional(failure) : std::nullopt;
  });
#endif
}

// What mori's Python layer imports by name and what can't be had without a GPU, or is not asked for here.
static void add_refused(py::module_& m) {
  for (const char* name : {"fabric_alloc", "fabric_free", "set_log_level"})
    m.def(name, [name](const py::args&) { throw std::runtime_error(std::string(name) + ": not in kvcover's binding"); });
  m.attr("FabricBackendConfig") = py::none();
}

PYBIND11_MODULE(cpp, m) {
  add_enums(m);
  add_settings(m);
  add_descriptions(m);
  add_status(m);
  add_engine(m);
  add_refused(m);
}
