//! The table of routes.

use super::{filesystem::method::Method, head::FILES};

/// A handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    Init,
    Envs,
    Metrics,
    Freeze,
    Thaw,
    ReadFile,
    WriteFile,
    /// A byte stream to a port of the guest.
    Tunnel,
    Process(ProcessCall),
    ProcessStream(ProcessStream),
    /// The RPC whose request is a stream.
    StreamInput,
    Filesystem(Method),
    WatchDir,
    /// An RPC of the data plane that is not offered.
    UnknownRpc,
}

/// RPCs of `process.Process` that are answered with a stream of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessStream {
    Start,
    Connect,
}

/// Unary RPCs of `process.Process`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessCall {
    List,
    SendInput,
    SendSignal,
    CloseStdin,
    Update,
}

/// A request without a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoute {
    NotFound,
    MethodNotAllowed,
}

/// Finds the handler of a request.
pub(crate) fn find(method: &str, path: &str) -> Result<Route, NoRoute> {
    use ProcessCall::{CloseStdin, List, SendInput, SendSignal, Update};
    let (wanted, route) = match path {
        "/health" => ("GET", Route::Health),
        "/init" => ("POST", Route::Init),
        "/envs" => ("GET", Route::Envs),
        "/metrics" => ("GET", Route::Metrics),
        "/fsfreeze" => ("POST", Route::Freeze),
        "/fsthaw" => ("POST", Route::Thaw),
        FILES if method == "GET" => ("GET", Route::ReadFile),
        FILES => ("POST", Route::WriteFile),
        "/process.Process/Start" => ("POST", Route::ProcessStream(ProcessStream::Start)),
        "/process.Process/Connect" => ("POST", Route::ProcessStream(ProcessStream::Connect)),
        "/process.Process/StreamInput" => ("POST", Route::StreamInput),
        "/process.Process/List" => ("POST", Route::Process(List)),
        "/process.Process/SendInput" => ("POST", Route::Process(SendInput)),
        "/process.Process/SendSignal" => ("POST", Route::Process(SendSignal)),
        "/process.Process/Update" => ("POST", Route::Process(Update)),
        "/process.Process/CloseStdin" => ("POST", Route::Process(CloseStdin)),
        _ if path.starts_with("/process.Process/") => ("POST", Route::UnknownRpc),
        _ if path.starts_with(FILESYSTEM) => ("POST", find_filesystem(path)),
        // The target of a CONNECT is `host:port`, which matches no path above.
        _ if method == "CONNECT" => ("CONNECT", Route::Tunnel),
        _ => return Err(NoRoute::NotFound),
    };
    if method == wanted {
        Ok(route)
    } else {
        Err(NoRoute::MethodNotAllowed)
    }
}

const FILESYSTEM: &str = "/filesystem.Filesystem/";

#[cold]
#[inline(never)]
fn find_filesystem(path: &str) -> Route {
    let name = path.strip_prefix(FILESYSTEM).unwrap_or_default();
    if name == "WatchDir" {
        return Route::WatchDir;
    }
    Method::find(name).map_or(Route::UnknownRpc, Route::Filesystem)
}

impl Route {
    /// Whether the route is served before the guest has an identity.
    pub(crate) fn is_open(self) -> bool {
        matches!(self, Self::Health | Self::Init)
    }

    /// Whether the request must carry the access token. Tunnels are authorized by the host, the only peer that reaches
    /// the listener.
    pub(crate) fn needs_token(self) -> bool {
        !self.is_open() && self != Self::Tunnel
    }
}
