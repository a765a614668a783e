#include "intra_node/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/status.h"

namespace herring::intra_node {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& call) {
  const int error = errno;
  throw Error(Code::kTransport, call + " failed: " + std::strerror(error));
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

void FileDescriptor::reset() {
  if (fd_ >= 0) close(release());
}

FileDescriptor make_shared_memory(const char* purpose, std::uint64_t bytes) {
  FileDescriptor fd(memfd_create(purpose, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_open()) fail(std::string("memfd_create(") + purpose + ")");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail("ftruncate of " + std::string(purpose) + " to " + std::to_string(bytes) + " bytes");
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail(std::string("fcntl(F_ADD_SEALS) on ") + purpose);
  return fd;
}

void check_shared_memory(const FileDescriptor& fd, std::uint64_t bytes, const std::string& whose) {
  struct stat info {};
  if (fstat(fd.get(), &info) != 0 || static_cast<std::uint64_t>(info.st_size) != bytes) {
    throw Error(Code::kProtocol, whose + " is not " + std::to_string(bytes) + " bytes of shared memory");
  }
  // Not sealed, its owner could shrink it and every access here would be a SIGBUS.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(Code::kProtocol, whose + " is not sealed against shrinking");
  }
}

FileDescriptor make_doorbell() {
  FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.is_open()) fail("eventfd");
  return fd;
}

void check_doorbell(const FileDescriptor& fd, const std::string& whose) {
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd.get());
  const ssize_t length = readlink(link.c_str(), target, sizeof(target) - 1);
  // Where /proc is missing there is nothing to compare with; the write is still checked to be non-blocking.
  if (length > 0 && std::strstr(target, "[eventfd]") == nullptr) {
    throw Error(Code::kProtocol, whose + " is not an eventfd");
  }
  const int flags = fcntl(fd.get(), F_GETFL);
  if (flags < 0 || (flags & O_NONBLOCK) == 0) throw Error(Code::kProtocol, whose + " is not non-blocking");
}

Mapping::Mapping(const FileDescriptor& fd, std::uint64_t bytes, const std::string& purpose) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (address == MAP_FAILED) {
    fail("mmap of " + purpose + " (" + std::to_string(bytes) + " bytes of address space)");
  }
  bytes_ = {static_cast<std::byte*>(address), bytes};
  // Advice: where the kernel keeps shared memory off huge pages, small ones work too.
  (void)madvise(address, bytes, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace herring::intra_node
