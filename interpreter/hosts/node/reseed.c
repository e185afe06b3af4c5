// An add-on of one function: makes OpenSSL's generators, which live in this process, draw from the kernel
// again. Node has no call for that, and clones of a snapshot wake up with the same generators.
//
// The declarations are those of Node's stable ABI (node_api.h) and of OpenSSL (rand.h); their headers are not
// needed for four functions.

#include <stddef.h>

typedef struct napi_env__ *napi_env;
typedef struct napi_value__ *napi_value;
typedef struct napi_callback_info__ *napi_callback_info;
typedef napi_value (*napi_callback)(napi_env, napi_callback_info);

int napi_create_function(napi_env, const char *, size_t, napi_callback, void *, napi_value *);
int napi_get_boolean(napi_env, _Bool, napi_value *);
int RAND_poll(void);

static napi_value reseed(napi_env env, napi_callback_info info) {
    (void)info;
    napi_value done = NULL;
    napi_get_boolean(env, RAND_poll() == 1, &done);
    return done;
}

__attribute__((visibility("default"))) napi_value napi_register_module_v1(napi_env env, napi_value exports) {
    napi_value function = exports;
    napi_create_function(env, "reseed", 6, reseed, NULL, &function);
    return function;
}
