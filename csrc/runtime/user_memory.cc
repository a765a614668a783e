#include "runtime/user_memory.h"

#include <span>
#include <utility>

#include "core/status.h"
#include "memory/buffer.h"

namespace herring::runtime {
namespace {

/// Keeps the buffer for as long as anybody has the bytes.
std::shared_ptr<std::byte> share(memory::Buffer buffer) {
  auto owner = std::make_shared<memory::Buffer>(std::move(buffer));
  std::byte* const start = owner->data();
  return {std::move(owner), start};
}

}  // namespace

std::shared_ptr<std::byte> allocate_private(memory::Domain& domain, std::size_t bytes) {
  memory::Buffer mapped;
  try {
    mapped = memory::map_host(bytes);
  } catch (const Error&) {
    return nullptr;
  }
  const std::span<std::byte> memory = mapped.bytes();
  std::shared_ptr<std::byte> owner = share(std::move(mapped));
  if (!domain.needs_registration()) return owner;
  try {
    return share(domain.adopt(memory, MemoryKind::kHost, owner));
  } catch (const Error&) {
    return owner;
  }
}

std::shared_ptr<std::byte> allocate_in_arena(memory::Domain& domain,
                                             const std::shared_ptr<intra_node::Neighborhood>& arena,
                                             std::size_t bytes) {
  const std::span<std::byte> memory = arena->allocate_to_keep(bytes);
  if (memory.empty()) return nullptr;
  std::shared_ptr<std::byte> owner(memory.data(), [arena, memory](std::byte*) { arena->deallocate(memory); });
  if (!domain.needs_registration()) return owner;
  try {
    return share(domain.adopt(memory, MemoryKind::kShared, owner, memory::Reuse::kUntilInvalidated));
  } catch (const Error&) {
    return owner;
  }
}

}  // namespace herring::runtime
