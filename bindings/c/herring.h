/* Herring's C interface: what a binding of any framework needs, and nothing else. docs/c-api.md explains it.
 *
 * A function that can fail returns a herring_code, HERRING_OK (0) where it did not; herring_last_error() has the text.
 * Structs that the caller fills begin with their size (sizeof), so that later versions can add fields at their end: set
 * the rest to 0. All functions may be called from any thread; handles are freed once, when no call uses them.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. The upper 16 bits change where something here changes its meaning or goes. */
#define HERRING_API_VERSION 0x00010001u

#if defined(__GNUC__)
#define HERRING_API __attribute__((visibility("default")))
#else
#define HERRING_API
#endif

/* Numbers of herring::Code; never used again. */
typedef enum herring_code {
  HERRING_OK = 0,
  HERRING_AGAIN = 1, /* of herring_wait: it has not ended by then, and goes on */
  HERRING_INVALID_ARGUMENT = 2,
  HERRING_MISMATCH = 3, /* ranks disagree; the text says who said what */
  HERRING_TIMEOUT = 4,  /* the text names the ranks that did not come */
  HERRING_PEER_LOST = 5,
  HERRING_PROTOCOL = 6,
  HERRING_TRANSPORT = 7,
  HERRING_SHUTDOWN = 8,
  HERRING_UNAVAILABLE = 9,
  HERRING_CANCELLED = 10,
  HERRING_INTERNAL = 11,
  HERRING_CORRUPTED = 12,
  HERRING_NOT_FINITE = 13
} herring_code;

typedef enum herring_dtype {
  HERRING_FLOAT32 = 1,
  HERRING_FLOAT64 = 2,
  HERRING_FLOAT16 = 3,
  HERRING_BFLOAT16 = 4,
  HERRING_INT8 = 5,
  HERRING_INT16 = 6,
  HERRING_INT32 = 7,
  HERRING_INT64 = 8,
  HERRING_UINT8 = 9,
  HERRING_BOOL = 10
} herring_dtype;

typedef enum herring_op {
  HERRING_SUM = 1,
  HERRING_AVERAGE = 2,
  HERRING_MIN = 3,
  HERRING_MAX = 4,
  HERRING_PRODUCT = 5,
  HERRING_BAND = 6,
  HERRING_BOR = 7,
  HERRING_BXOR = 8
} herring_op;

typedef enum herring_collective {
  HERRING_ALL_REDUCE = 1,
  HERRING_BROADCAST = 2,
  HERRING_ALL_GATHER = 3,
  HERRING_BARRIER = 4
} herring_collective;

typedef struct herring_job herring_job;       /* a worker's place in a job */
typedef struct herring_work herring_work;     /* a pending operation */
typedef struct herring_memory herring_memory; /* memory that operations use without a copy */

/* HERRING_API_VERSION of the library that is loaded. */
HERRING_API uint32_t herring_api_version(void);
/* What went wrong in the last call of this thread that failed; lives until its next call. Never null. */
HERRING_API const char* herring_last_error(void);

typedef struct herring_join_options {
  size_t struct_bytes;
  uint32_t rank;    /* from 0 to size - 1 */
  uint32_t size;    /* number of workers */
  const char* hub;  /* "host:port" of worker 0's process, the same for all; null: HERRING_HUB */
  double timeout_s; /* until all are there; 0: HERRING_JOIN_TIMEOUT_S */
} herring_join_options;

/* Joins the job and connects, with the settings of the environment (HERRING_*): every worker calls it. Worker 0 opens
 * the hub. Not for elastic jobs. */
HERRING_API herring_code herring_join(const herring_join_options* options, herring_job** job);
/* Ends what is pending and leaves; frees the job. Handles of its operations and memory stay valid. Null: nothing. */
HERRING_API void herring_leave(herring_job* job);
/* Fails everything pending on all ranks, and what comes later, with this reason. */
HERRING_API void herring_abort(herring_job* job, const char* reason);

HERRING_API uint32_t herring_rank(const herring_job* job);
HERRING_API uint32_t herring_size(const herring_job* job);
HERRING_API uint32_t herring_local_rank(const herring_job* job);
HERRING_API uint32_t herring_local_size(const herring_job* job);

/* Some of the job's ranks, in group order; each of them calls it with the same id, from 1 to 2^22 - 1 and not in use.
 * Group 0 is the whole job. */
HERRING_API herring_code herring_add_group(herring_job* job, uint32_t group, const uint32_t* ranks, size_t count);
/* Each of its ranks calls it. What is pending on some of them only ends with an error; who has nothing pending waits
 * for the others for a second at most. */
HERRING_API herring_code herring_remove_group(herring_job* job, uint32_t group);

/* The caller waits at once: its own thread moves the data, and the operation does not wait for others to join it. */
#define HERRING_WAITED_FOR 1u
/* The operation travels by itself, however small. */
#define HERRING_ALONE 2u

typedef struct herring_request {
  size_t struct_bytes;
  int32_t collective; /* herring_collective */
  int32_t dtype;      /* herring_dtype */
  int32_t op;         /* herring_op, of HERRING_ALL_REDUCE */
  uint32_t root;      /* rank in the group, of HERRING_BROADCAST */
  uint32_t group;
  uint32_t flags;
  /* Matches the calls of different ranks, in any order; null: by the order of calls. Small all-reduces with a name
   * travel together. */
  const char* name;
  uint32_t dims;         /* of this rank's argument, */
  const uint64_t* shape; /* at most 8 */
  const void* input;     /* null: in place */
  void* output;          /* HERRING_ALL_GATHER: size of the group times the argument */
  double timeout_s;      /* until it fails on all ranks; 0: HERRING_TIMEOUT_S */
} herring_request;

/* Starts an operation; never waits for other ranks. Memory is borrowed until it has ended. */
HERRING_API herring_code herring_submit(herring_job* job, const herring_request* request, herring_work** work);
/* HERRING_OK: it has ended well. HERRING_AGAIN: not after timeout_s seconds, and it goes on. Else why it failed. */
HERRING_API herring_code herring_wait(herring_work* work, double timeout_s);
/* Calls it once, when the operation has ended, on a thread of Herring's that may block; at once where it has. `text`
 * lives as long as the call. */
HERRING_API herring_code herring_on_done(herring_work* work,
                                         void (*callback)(void* context, herring_code code, const char* text),
                                         void* context);
/* Frees the handle; the operation goes on. Null: nothing. */
HERRING_API void herring_release(herring_work* work);

/* Messages between two ranks of a group; met by the same group, tag and number of bytes. */
HERRING_API herring_code herring_send(herring_job* job, uint32_t group, uint32_t to, uint64_t tag, const void* data,
                                      size_t bytes, herring_work** work);
HERRING_API herring_code herring_receive(herring_job* job, uint32_t group, uint32_t from, uint64_t tag, void* memory,
                                         size_t bytes, herring_work** work);

/* Memory that the host's ranks share and the network can reach. HERRING_UNAVAILABLE where the arena is full: ordinary
 * memory works, and is copied. */
HERRING_API herring_code herring_allocate(herring_job* job, size_t bytes, herring_memory** memory);
/* Memory for `count` tensors of a group by name, the i-th of bytes[i], one after the other; places[i] is where it lies.
 * All-reduces of them in place with these names copy nothing on this side: what lies side by side and is ready on all
 * ranks is one operation, whatever its size. Put tensors of one dtype side by side. Ranks may ask for other memory, or
 * for none. Where the arena is full the memory is ordinary. Since version 0x00010001. */
HERRING_API herring_code herring_allocate_named(herring_job* job, uint32_t group, size_t count,
                                                const char* const* names, const size_t* bytes, herring_memory** memory,
                                                void** places);
HERRING_API void* herring_data(const herring_memory* memory);
HERRING_API void herring_free(herring_memory* memory);

#ifdef __cplusplus
}
#endif
