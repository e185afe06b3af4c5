//! Which handler a request belongs to.

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    Init,
    Envs,
    ReadFile,
    WriteFile,
    Stream(Stream),
    Unary(Unary),
    /// An RPC of the data plane that is not offered.
    UnknownRpc,
}

/// RPCs that are answered with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Start,
    Connect,
}

/// RPCs that are answered once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    List,
    SendInput,
    SendSignal,
    CloseStdin,
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
        "/files" if method == "GET" => ("GET", Route::ReadFile),
        "/files" => ("POST", Route::WriteFile),
        "/process.Process/Start" => ("POST", Route::Stream(Stream::Start)),
        "/process.Process/Connect" => ("POST", Route::Stream(Stream::Connect)),
        "/process.Process/List" => ("POST", Route::Unary(Unary::List)),
        "/process.Process/SendInput" => ("POST", Route::Unary(Unary::SendInput)),
        "/process.Process/SendSignal" => ("POST", Route::Unary(Unary::SendSignal)),
        "/process.Process/CloseStdin" => ("POST", Route::Unary(Unary::CloseStdin)),
        _ if path.starts_with("/process.Process/")
            || path.starts_with("/filesystem.Filesystem/") =>
        {
            ("POST", Route::UnknownRpc)
        }
        _ => return Err(NoRoute::NotFound),
    };
    match method == wanted {
        true => Ok(route),
        false => Err(NoRoute::MethodNotAllowed),
    }
}

impl Route {
    /// Whether it is answered before the guest has an identity, and without a token.
    pub(crate) fn is_open(self) -> bool {
        matches!(self, Self::Health | Self::Init)
    }
}
