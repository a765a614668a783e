#pragma once

#include <string>

#include "core/status.h"

namespace herring {

[[noreturn]] inline void refuse(const std::string& what) { throw Error(Code::kInvalidArgument, what); }

}  // namespace herring
