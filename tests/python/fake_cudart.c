/* A programmable CUDA runtime for tests: a real shared library with the runtime's symbols, found and
 * loaded the way the real one is. It records calls and answers as it was told. */

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { REGISTER = 1, UNREGISTER = 2, SET_DEVICE = 3, LAST_ERROR = 4 };

struct call {
    int kind;
    size_t address;
    size_t size;
    unsigned flags;
    int device; /* current on the calling thread */
    int answer;
};

#define MOST_CALLS 100000
static struct call calls[MOST_CALLS];
static int call_count;

static int devices = 1, devices_code;
static int register_nth, register_code, register_times;
static size_t limit_bytes;
static int limit_code;
static int unregister_code;
static unsigned delay_us;

/* As in the real runtime: per thread. */
static __thread int pending;
static __thread int current_device;

static int record(int kind, size_t address, size_t size, unsigned flags, int answer)
{
    int index = __atomic_fetch_add(&call_count, 1, __ATOMIC_SEQ_CST);
    if (index < MOST_CALLS)
        calls[index] = (struct call){kind, address, size, flags, current_device, answer};
    if (answer != 0)
        pending = answer;
    return answer;
}

/* What the test says. */

void fake_devices(int count, int code) { devices = count; devices_code = code; }
/* The nth registration from now on (1 is the next) and `times` - 1 after it answer `code`. */
void fake_fail_register(int nth, int code, int times) { register_nth = nth; register_code = code; register_times = times; }
/* Registrations of more than `bytes` answer `code`. */
void fake_limit(size_t bytes, int code) { limit_bytes = bytes; limit_code = code; }
void fake_fail_unregister(int code) { unregister_code = code; }
void fake_delay(unsigned microseconds) { delay_us = microseconds; }
void fake_set_pending(int code) { pending = code; }
int fake_pending(void) { return pending; }
int fake_device(void) { return current_device; }
int fake_call_count(void) { return call_count; }
struct call fake_call(int index) { return calls[index]; }
void fake_forget(void) { call_count = 0; }

/* What the runtime offers. */

int cudaGetDeviceCount(int *count)
{
    *count = devices_code ? 0 : devices;
    if (devices_code != 0)
        pending = devices_code;
    return devices_code;
}

int cudaSetDevice(int device)
{
    current_device = device;
    return record(SET_DEVICE, 0, 0, 0, 0);
}

#ifndef WITHOUT_REGISTER
int cudaHostRegister(void *address, size_t size, unsigned flags)
{
    int answer = 0;
    if (delay_us)
        usleep(delay_us);
    if (limit_bytes && size > limit_bytes)
        answer = limit_code;
    if (register_nth > 0 && --register_nth == 0) {
        answer = register_code;
        if (--register_times > 0)
            register_nth = 1;
    }
    return record(REGISTER, (size_t)address, size, flags, answer);
}
#endif

int cudaHostUnregister(void *address)
{
    return record(UNREGISTER, (size_t)address, 0, 0, unregister_code);
}

#ifndef WITHOUT_LAST_ERROR
int cudaGetLastError(void)
{
    int code = pending;
    pending = 0;
    record(LAST_ERROR, 0, 0, 0, 0);
    return code;
}
#endif

#ifndef WITHOUT_ERROR_TEXT
const char *cudaGetErrorName(int code)
{
    static __thread char name[32];
    snprintf(name, sizeof name, "cudaErrorFake%d", code);
    return name;
}

const char *cudaGetErrorString(int code)
{
    static __thread char text[64];
    snprintf(text, sizeof text, "the fake runtime answered %d", code);
    return text;
}
#endif
