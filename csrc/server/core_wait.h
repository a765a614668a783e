#pragma once

namespace herring::server {

/// `share`: what part of the time in which a lane had work its thread waited for a core, 0 to 1. True where that is
/// often: then what takes long does so because of the cores, not because of the link. Where only the link is slow,
/// beside other programs too, it was at most 0.3; where the cores were, 0.34 and more.
constexpr bool waits_for_cores(double share) { return share > 0.3; }

}  // namespace herring::server
