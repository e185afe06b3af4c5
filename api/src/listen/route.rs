//! Determines the destination of a request, from its head alone.

use axum::http::{Method, Request};
use model::SandboxId;

use super::gate::Passage;
use crate::proxy::{ByPath, Hosts, Refusal, Target, by_path};

/// The destination of a request.
pub(super) enum Route {
    /// The control plane.
    Control,
    /// A sandbox in the host name or in header fields.
    ByHost { id: SandboxId, port: u16 },
    /// A sandbox in the path.
    ByPath(ByPath),
    /// The sandbox whose token signed this file operation.
    Signed(&'static str),
    /// Nothing that can be served.
    Invalid(Refusal),
}

impl Route {
    pub(super) fn of<B>(hosts: &Hosts, request: &Request<B>) -> Self {
        match hosts.target(request.uri(), request.headers()) {
            Ok(Target::Sandbox { id, port }) => Self::ByHost { id, port },
            Ok(Target::Control) => match (by_path(request.uri()), signed_operation(request)) {
                (Some(Ok(found)), _) => Self::ByPath(found),
                (Some(Err(why)), _) => Self::Invalid(why.into()),
                (None, Some(Ok(operation))) => Self::Signed(operation),
                (None, Some(Err(refusal))) => Self::Invalid(refusal),
                (None, None) => Self::Control,
            },
            Err(why) => Self::Invalid(why.into()),
        }
    }

    pub(super) fn passage(&self) -> Passage {
        match self {
            Self::Control => Passage::Control,
            Self::ByHost { .. } | Self::ByPath(_) | Self::Signed(_) | Self::Invalid(_) => {
                Passage::Traffic
            }
        }
    }
}

/// The operation that the signature of a signed file URL covers. `None`: the URL is not a signed file URL.
fn signed_operation<B>(request: &Request<B>) -> Option<Result<&'static str, Refusal>> {
    let query = request.uri().query().unwrap_or_default();
    let is_signed = query.split('&').any(|pair| pair.starts_with("signature="));
    if request.uri().path() != "/files" || !is_signed {
        return None;
    }
    Some(match *request.method() {
        Method::GET | Method::HEAD => Ok("read"),
        Method::POST | Method::PUT => Ok("write"),
        _ => Err(Refusal::Method),
    })
}
