//! Which handler a request belongs to.

use super::{filesystem, http};

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    Init,
    Envs,
    Metrics,
    ReadFile,
    WriteFile,
    /// A byte stream to a port of the guest.
    Tunnel,
    Stream(Stream),
    /// The RPC whose request is a stream.
    StreamInput,
    Unary(Unary),
    /// An RPC of the data plane that is not offered.
    UnknownRpc,
}

/// RPCs that are answered with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Start,
    Connect,
    WatchDir,
}

/// RPCs that are answered once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    List,
    SendInput,
    SendSignal,
    CloseStdin,
    Update,
    Filesystem(filesystem::Method),
}

/// The status to answer with when there is no handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoute {
    NotFound,
    MethodNotAllowed,
}

/// Finds the handler.
pub(crate) fn find(method: &str, path: &str) -> Result<Route, NoRoute> {
    let (wanted, route) = match path {
        "/health" => ("GET", Route::Health),
        "/init" => ("POST", Route::Init),
        "/envs" => ("GET", Route::Envs),
        "/metrics" => ("GET", Route::Metrics),
        http::FILES if method == "GET" => ("GET", Route::ReadFile),
        http::FILES => ("POST", Route::WriteFile),
        "/process.Process/Start" => ("POST", Route::Stream(Stream::Start)),
        "/process.Process/Connect" => ("POST", Route::Stream(Stream::Connect)),
        "/process.Process/StreamInput" => ("POST", Route::StreamInput),
        "/process.Process/List" => ("POST", Route::Unary(Unary::List)),
        "/process.Process/SendInput" => ("POST", Route::Unary(Unary::SendInput)),
        "/process.Process/SendSignal" => ("POST", Route::Unary(Unary::SendSignal)),
        "/process.Process/Update" => ("POST", Route::Unary(Unary::Update)),
        "/process.Process/CloseStdin" => ("POST", Route::Unary(Unary::CloseStdin)),
        _ if path.starts_with("/process.Process/") => ("POST", Route::UnknownRpc),
        _ if path.starts_with(FILESYSTEM) => ("POST", find_filesystem(path)),
        // Its path is no path, so it meets none of the above.
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
        return Route::Stream(Stream::WatchDir);
    }
    let method = filesystem::Method::find(name);
    method.map_or(Route::UnknownRpc, |method| {
        Route::Unary(Unary::Filesystem(method))
    })
}

impl Route {
    /// Whether it is answered before the guest has an identity.
    pub(crate) fn is_open(self) -> bool {
        matches!(self, Self::Health | Self::Init)
    }

    /// Whether the access token is wanted. Who may open a tunnel is for the host to decide: nobody else
    /// reaches the listener.
    pub(crate) fn needs_token(self) -> bool {
        !self.is_open() && self != Self::Tunnel
    }
}
