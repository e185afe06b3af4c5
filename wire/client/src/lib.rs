//! Connections to an API server by its base URL: plain HTTP, and HTTPS with the host's certificate authorities or one
//! that the caller names. `envd::EnvdClient` speaks both planes over them. Blocking, without a runtime.

pub mod endpoint;
