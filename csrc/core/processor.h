#pragma once

namespace herring {

/// Whether this processor computes CRC32C by an instruction (SSE4.2, or aarch64's CRC32). Looked up once.
bool has_crc32c_instruction() noexcept;

}  // namespace herring
