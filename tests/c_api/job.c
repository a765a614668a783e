/* One worker of a job, on Herring's C interface alone: job RANK SIZE HOST:PORT. Prints what went wrong, and ends
 * with 1. */
#include "herring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 300

static uint32_t rank, size;

static void fail(const char* what, const char* text) {
  fprintf(stderr, "rank %u: %s: %s\n", rank, what, text);
  exit(1);
}

static void check(herring_code code, const char* what) {
  if (code != HERRING_OK) fail(what, herring_last_error());
}

static void require(int is_true, const char* what) {
  if (!is_true) fail(what, "it is not so");
}

/* An all-reduce of float32, in place. */
static herring_request sum_of(const char* name, float* values, const uint64_t* shape) {
  herring_request request;
  memset(&request, 0, sizeof request);
  request.struct_bytes = sizeof request;
  request.collective = HERRING_ALL_REDUCE;
  request.dtype = HERRING_FLOAT32;
  request.op = HERRING_SUM;
  request.name = name;
  request.dims = 1;
  request.shape = shape;
  request.output = values;
  return request;
}

/* Small arrays by name, in another order on each rank, in memory of the arena. */
static void reduce_by_name(herring_job* job) {
  const uint64_t shape[1] = {8};
  herring_memory* memory = NULL;
  herring_work* works[COUNT];
  check(herring_allocate(job, COUNT * 8 * sizeof(float), &memory), "herring_allocate");
  float* values = herring_data(memory);
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < COUNT * 8; ++i) values[i] = (float)(rank + 1) * (float)(i / 8);
    for (int i = 0; i < COUNT; ++i) {
      const int which = rank % 2 == 0 ? i : COUNT - 1 - i;
      char name[32];
      snprintf(name, sizeof name, "grad.%d", which);
      const herring_request request = sum_of(name, values + which * 8, shape);
      check(herring_submit(job, &request, &works[which]), "herring_submit");
    }
    for (int i = 0; i < COUNT; ++i) {
      check(herring_wait(works[i], 60), "herring_wait");
      herring_release(works[i]);
    }
    for (int i = 0; i < COUNT * 8; ++i) {
      require(values[i] == (float)(size * (size + 1) / 2) * (float)(i / 8), "a sum is that of all ranks");
    }
  }
  herring_free(memory);
}

/* Arrays that lie one after the other, the last of them too large to travel with others by itself; rank 1 has its own
 * memory. */
static void reduce_in_place(herring_job* job) {
  enum { kArrays = 30, kLarge = 400000 };
  static float own[kArrays][kLarge];
  static char texts[kArrays][32];
  const char* names[kArrays];
  size_t bytes[kArrays];
  void* places[kArrays];
  herring_memory* memory = NULL;
  herring_work* works[kArrays];
  uint64_t counts[kArrays];
  for (int i = 0; i < kArrays; ++i) {
    snprintf(texts[i], sizeof texts[i], "place.%d", i);
    names[i] = texts[i];
    counts[i] = i + 1 < kArrays ? (uint64_t)i : kLarge;
    bytes[i] = counts[i] * sizeof(float);
    places[i] = own[i];
  }
  if (rank != 1)
    check(herring_allocate_named(job, 0, kArrays, names, bytes, &memory, places), "herring_allocate_named");
  require(rank == 1 || places[0] == herring_data(memory), "the first one is at its beginning");
  for (int turn = 0; turn < 4; ++turn) {
    for (int i = 0; i < kArrays; ++i) {
      for (uint64_t j = 0; j < counts[i]; ++j) ((float*)places[i])[j] = (float)(rank + 1);
      const herring_request request = sum_of(names[i], places[i], &counts[i]);
      check(herring_submit(job, &request, &works[i]), "herring_submit");
    }
    for (int i = 0; i < kArrays; ++i) {
      check(herring_wait(works[i], 60), "herring_wait");
      herring_release(works[i]);
      for (uint64_t j = 0; j < counts[i]; ++j) {
        require(((float*)places[i])[j] == (float)(size * (size + 1) / 2), "a sum is that of all ranks");
      }
    }
  }
  herring_free(memory);
  names[3] = names[4];
  require(herring_allocate_named(job, 0, kArrays, names, bytes, &memory, places) == HERRING_INVALID_ARGUMENT,
          "a name that comes twice is refused");
  require(strstr(herring_last_error(), "place.4") != NULL, "the text has the name");
}

static void tell(void* context, herring_code code, const char* text) {
  *(volatile int*)context = code == HERRING_OK && text[0] == '\0' ? 1 : 2;
}

static void other_collectives(herring_job* job) {
  const uint64_t shape[1] = {2};
  float block[2] = {(float)rank, 7};
  float all[64];
  volatile int seen = 0;
  herring_work* work = NULL;
  herring_request request = sum_of(NULL, all, shape);
  request.collective = HERRING_ALL_GATHER;
  request.input = block;
  request.flags = HERRING_WAITED_FOR;
  check(herring_submit(job, &request, &work), "herring_submit of an all_gather");
  check(herring_wait(work, 60), "herring_wait");
  herring_release(work);
  for (uint32_t each = 0; each < size; ++each) require(all[2 * each] == (float)each, "blocks are in order of rank");

  memset(&request, 0, sizeof request);
  request.struct_bytes = sizeof request;
  request.collective = HERRING_BARRIER;
  check(herring_submit(job, &request, &work), "herring_submit of a barrier");
  check(herring_on_done(work, tell, (void*)&seen), "herring_on_done");
  check(herring_wait(work, 60), "herring_wait");
  herring_release(work);

  herring_work* sent = NULL;
  herring_work* received = NULL;
  float mine = (float)rank, theirs = -1;
  check(herring_send(job, 0, (rank + 1) % size, 5, &mine, sizeof mine, &sent), "herring_send");
  check(herring_receive(job, 0, (rank + size - 1) % size, 5, &theirs, sizeof theirs, &received), "herring_receive");
  check(herring_wait(sent, 60), "herring_wait");
  check(herring_wait(received, 60), "herring_wait");
  require(theirs == (float)((rank + size - 1) % size), "a message is that of the rank before");
  herring_release(sent);
  herring_release(received);
  while (seen == 0) {
  }
  require(seen == 1, "the callback hears of a good end");
}

static void errors_are_told(herring_job* job) {
  float values[4] = {0, 0, 0, 0};
  const uint64_t shape[1] = {2 + rank};
  herring_work* work = NULL;
  herring_request request = sum_of("odd", values, shape);
  check(herring_submit(job, &request, &work), "herring_submit");
  const herring_code code = herring_wait(work, 60);
  require(code == HERRING_MISMATCH, "shapes that differ are a mismatch");
  require(strstr(herring_last_error(), "float32[2]") != NULL, "the text has the shapes");
  require(strstr(herring_last_error(), "float32[3]") != NULL, "the text has the shapes");
  herring_release(work);

  request.dtype = 99;
  require(herring_submit(job, &request, &work) == HERRING_INVALID_ARGUMENT, "a number that names no dtype is refused");
  require(strstr(herring_last_error(), "99") != NULL, "the text has the number");
  require(herring_submit(NULL, &request, &work) == HERRING_INVALID_ARGUMENT, "null is refused");
  request = sum_of("odd", values, shape);
  request.struct_bytes = 0;
  require(herring_submit(job, &request, &work) == HERRING_INVALID_ARGUMENT, "a struct without its size is refused");
}

int main(int count, char** arguments) {
  herring_join_options options;
  herring_job* job = NULL;
  if (count != 4) return 2;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.rank = rank = (uint32_t)atoi(arguments[1]);
  options.size = size = (uint32_t)atoi(arguments[2]);
  options.hub = arguments[3];
  require(herring_api_version() >> 16 == HERRING_API_VERSION >> 16, "the library is of this header's version");
  check(herring_join(&options, &job), "herring_join");
  require(herring_rank(job) == rank && herring_size(job) == size, "the job knows its ranks");
  reduce_by_name(job);
  reduce_in_place(job);
  other_collectives(job);
  errors_are_told(job);
  reduce_by_name(job);
  herring_leave(job);
  return 0;
}
