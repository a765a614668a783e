#pragma once

#include <cstdint>
#include <string>

#include "runtime/control.h"

namespace herring::runtime {

/// What this process says of itself when it joins a job. `launch`: Member, same name.
Member own_member(Role role, std::uint32_t rank, std::string launch = {});

}  // namespace herring::runtime
