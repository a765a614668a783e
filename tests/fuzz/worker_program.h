#pragma once

#include <cstdint>

#include "engine_program.h"

/// The language in which fuzz_worker_engine reads its input: one byte of Setup, then steps, each an opcode and its
/// operands, one byte each.
namespace herring::fuzz {

enum class WorkerStep : std::uint8_t {
  kSubmit,    ///< key, kind, size
  kAbort,     ///< key
  kControl,   ///< which announce, type, chunk, count, a mutation: what its lane may answer
  kResult,    ///< which posted receive, a mutation: the Result that it waits for
  kNoise,     ///< which posted receive: it fails in the transport
  kSent,      ///< which send
  kNotSent,   ///< which send: it fails
  kLost,      ///< lanes first, then workers
  kTick,      ///< milliseconds * 100
  kGiveBack,  ///< which withdrawn receive
  kCount,
};

/// Low two bits: lanes - 1 (at most 3 of them). Bit 3 (kSetupFailover): failover. Bit 4: small parts are kept.
inline constexpr std::uint8_t kSetupRetain = 16;

}  // namespace herring::fuzz
