#include <array>
#include <string>

#include "bindings/core/python.h"
#include "core/clock.h"

namespace herring::python {
namespace {

/// The class in herring/_errors.py for a code: the tree is drawn there, once.
const char* class_name(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "InvalidArgumentError";
    case Code::kMismatch:
      return "MismatchError";
    case Code::kTimeout:
      return "HerringTimeoutError";
    case Code::kPeerLost:
      return "PeerLostError";
    case Code::kProtocol:
      return "ProtocolError";
    case Code::kTransport:
      return "TransportError";
    case Code::kShutdown:
      return "ShutdownError";
    case Code::kUnavailable:
      return "UnavailableError";
    case Code::kCancelled:
      return "CancelledError";
    case Code::kInternal:
      return "InternalError";
    case Code::kCorrupted:
      return "CorruptedError";
    case Code::kNotFinite:
      return "NotFiniteError";
    case Code::kOk:
    case Code::kAgain:
      break;
  }
  return "HerringError";
}

}  // namespace

void raise(const Error& error) noexcept {
  const Status& status = error.status();
  try {
    const py::object type = py::module_::import("herring._errors").attr(class_name(status.code()));
    PyErr_SetString(type.ptr(), status.message().c_str());
  } catch (py::error_already_set& unimportable) {
    unimportable.restore();
  }
}

std::string_view text_of(py::handle text) {
  Py_ssize_t bytes = 0;
  const char* const begin = PyUnicode_AsUTF8AndSize(text.ptr(), &bytes);
  if (begin == nullptr) throw py::error_already_set();
  return {begin, static_cast<std::size_t>(bytes)};
}

void register_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

Instant deadline_after(double seconds) {
  if (std::isnan(seconds) || seconds < 0) {
    throw Error(Code::kInvalidArgument, "a timeout is a number of seconds from 0 up, not " + std::to_string(seconds));
  }
  constexpr double kForever = 3600.0 * 24 * 365 * 10;
  return std::chrono::steady_clock::now() + duration_of(std::min(seconds, kForever));
}

}  // namespace herring::python
