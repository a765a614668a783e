#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace herring::intra_node::testing {

/// In a child process: GoogleTest's macros report to nobody there.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// Starts body(rank) in processes of its own and waits for them. Returns the exit codes: 0, or 1 where body threw (what
/// it threw is on stderr), or 128 + signal. No child outlives `limit_s`.
inline std::vector<int> run_processes(std::uint32_t count, const std::function<void(std::uint32_t)>& body,
                                      unsigned limit_s = 60) {
  std::vector<pid_t> pids;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(limit_s);
      int code = 0;
      try {
        body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      _exit(code);
    }
    pids.push_back(pid);
  }
  std::vector<int> codes;
  for (const pid_t pid : pids) {
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) {
      codes.push_back(255);
    } else {
      codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
  }
  return codes;
}

inline std::uint64_t random_token() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace herring::intra_node::testing
