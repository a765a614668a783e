#pragma once

#include <cstdint>

#include "engine_program.h"

/// The language in which fuzz_point_to_point reads its input: steps, each an opcode and its operands, one byte each.
namespace herring::fuzz {

enum class MessageStep : std::uint8_t {
  kControl,     ///< sender, type, detail (op, group, tag), chunk (size of an Envelope), count, credits, a mutation
  kSend,        ///< detail, size
  kReceive,     ///< detail, size
  kData,        ///< which posted receive, a mutation
  kNoise,       ///< which posted receive: it fails in the transport
  kSent,        ///< which send
  kNotSent,     ///< which send: it fails
  kLost,        ///< worker
  kLeft,        ///< worker
  kTick,        ///< milliseconds * 100
  kCloseGroup,  ///< group
  kCancel,      ///< unmatched receives
  kGiveBack,    ///< which withdrawn receive
  kCopy,        ///< which copy: it ends
  kCount,
};

}  // namespace herring::fuzz
