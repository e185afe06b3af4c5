// Makes OpenSSL's generators in this process read every byte from the kernel. They then have no state that a snapshot
// could copy into its clones, and need no reseeding.
//
// Built once, used twice: Node loads it as an add-on, which installs the method, and Python looks the method up by
// name. The declarations repeat those of OpenSSL (rand.h), Linux (getrandom(2)) and Node's stable ABI (node_api.h), so
// that the build needs no headers.

#include <stddef.h>
#include <sys/types.h>

typedef struct napi_env__ *napi_env;
typedef struct napi_value__ *napi_value;

struct rand_method {
    int (*seed)(const void *, int);
    int (*bytes)(unsigned char *, int);
    void (*cleanup)(void);
    int (*add)(const void *, int, double);
    int (*pseudorand)(unsigned char *, int);
    int (*status)(void);
};

// Weak: Node exports the symbol; in Python it is only visible inside its OpenSSL library.
__attribute__((weak)) int RAND_set_rand_method(const struct rand_method *);
ssize_t getrandom(void *, size_t, unsigned int);

static int bytes(unsigned char *to, int len) {
    while (len > 0) {
        // Fails only with EINTR, and never for up to 256 bytes.
        ssize_t got = getrandom(to, (size_t)len, 0);
        if (got > 0) {
            to += got;
            len -= (int)got;
        }
    }
    return 1;
}

static int seed(const void *from, int len) {
    (void)from, (void)len;
    return 1;
}

static int add(const void *from, int len, double entropy) {
    (void)from, (void)len, (void)entropy;
    return 1;
}

static int status(void) {
    return 1;
}

#define VISIBLE __attribute__((visibility("default")))

VISIBLE const struct rand_method cube_random = {seed, bytes, NULL, add, bytes, status};

VISIBLE napi_value napi_register_module_v1(napi_env env, napi_value exports) {
    (void)env;
    RAND_set_rand_method(&cube_random);
    return exports;
}
