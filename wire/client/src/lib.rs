//! Connections to an API server by its base URL: plain HTTP, and HTTPS with the host's certificate authorities or a
//! given one. `envd::EnvdClient` uses them for both planes. Blocking, without a runtime.

pub mod endpoint;
