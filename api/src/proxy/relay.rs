//! A request that is relayed unchanged to another server, which responds in place of this one.

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;

use super::{Upload, head, tunnel};

/// The client's side of such a request.
pub(crate) struct Relay {
    client: OnUpgrade,
    is_upgrade: bool,
}

impl Relay {
    /// The request for the other server. `host` is the host that the request names.
    pub(crate) fn of(mut request: Request<Upload>, host: &str) -> (Self, Request<Upload>) {
        let client = hyper::upgrade::on(&mut request);
        let (mut parts, body) = request.into_parts();
        let upgrade = if body.is_end_stream() {
            head::upgrade(&parts)
        } else {
            None
        };
        let is_upgrade = upgrade.is_some();
        head::to_successor(&mut parts, host, upgrade);
        let relay = Self { client, is_upgrade };
        (relay, Request::from_parts(parts, body))
    }

    /// The response for the client. `body` creates its body from the other server's. If the other server has switched
    /// protocols, both connections are joined, and `held` is kept until they end. Returns `None` if the server switched
    /// protocols without a request to do so.
    pub(crate) fn response(
        self,
        mut response: Response<Incoming>,
        held: impl Send + 'static,
        body: impl FnOnce(Incoming) -> Body,
    ) -> Option<Response<Body>> {
        let is_switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let server = hyper::upgrade::on(&mut response);
        let (mut parts, received) = response.into_parts();
        head::to_client(&mut parts);
        if !is_switched {
            return Some(Response::from_parts(parts, body(received)));
        }
        if !self.is_upgrade {
            return None;
        }
        tunnel::join(self.client, server, held);
        Some(Response::from_parts(parts, Body::empty()))
    }
}
