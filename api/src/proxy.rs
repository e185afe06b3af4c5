//! The data plane: forwards requests to ports of sandboxes.
//!
//! ```text
//! target ─► internal, cors ─► routes (resumes) ─► access ─► connections ─► head ─► exchange ─► reply
//!                                                                                          └─ 101 ─► tunnel
//! ```
//! Both sides speak HTTP/1.1, clients also HTTP/2. Every message is parsed and written anew, so the two sides cannot
//! disagree about where a message ends. Bodies are forwarded frame by frame with back-pressure, and buffers are
//! bounded. Responses and streams have no time limit, but the number of in-flight requests per sandbox is limited.
//!
//! Invariants:
//! - No request reaches an internal route of the agent.
//! - The code interpreter of a secure sandbox runs no code for requests without the sandbox's access token.
//! - No request that the sandbox may have seen is sent twice, unless it only reads.
//! - A body that was cut short never looks complete.
//! - A connection to one VM is never used for another.

// Which sandbox and port, and what a client may ask of it.
mod by_path;
mod target;

mod cookie;
mod cors;
mod internal;

mod access;
mod routes;

// A connection to the sandbox.
mod connections;
mod line;
mod tls;
mod upstream;

// The request and its response.
pub(crate) mod head;

mod exchange;
mod reply;
pub(crate) mod tunnel;
mod upload;

// Responses that no sandbox gives.
mod refusal;
mod relay;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderName, Request, Response, StatusCode, header};
use envd::ENVD_PORT;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use model::SandboxId;

pub use by_path::{ByPath, Origin, by_path, isolate};
pub use connections::IN_FLIGHT_MAX;
pub use refusal::{Form, Refusal};
pub(crate) use relay::Relay;
pub use routes::Routes;
pub use target::{Hosts, SANDBOX_ID, SANDBOX_PORT, Target, TargetError, host};
pub use upload::{Progress, Upload, UploadError};

use crate::{
    registry::{Route, RouteError},
    traces,
};
use connections::{Connections, RequestPermit};
use reply::{Held, Reply, Reuse};
use upstream::Sender;

/// Header with the token required by ports other than the agent's if they are not public.
const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
/// Maximum number of attempts to forward a request. The second attempt follows only if nothing of the request was sent
/// and the VM was replaced in the meantime.
const TRIES: usize = 2;
/// How often, and for how long, to check whether the pool has noticed the end of a VM that refuses connections.
const END_STEP: Duration = Duration::from_millis(2);
const END_LIMIT: Duration = Duration::from_secs(2);

/// Forwards requests to sandboxes.
#[derive(Clone, Debug)]
pub struct Proxy<R> {
    routes: R,
    connections: Connections,
}

/// The recipient of a request.
#[derive(Clone, Debug)]
pub struct Destination {
    pub id: SandboxId,
    pub port: u16,
    /// The host name that the client used, with its port.
    pub host: String,
}

impl<R: Routes> Proxy<R> {
    /// `routes` resolves the ids of sandboxes.
    pub fn new(routes: R) -> Self {
        let connections = Connections::default();
        Self {
            routes,
            connections,
        }
    }

    #[must_use]
    pub fn routes(&self) -> &R {
        &self.routes
    }

    /// Closes expired idle connections; never returns.
    pub async fn close_expired(&self) {
        self.connections.close_expired().await;
    }

    /// Forwards a request. If the response upgrades the connection, `held` is kept until the upgraded connection ends.
    /// `ticket` is kept until the sandbox's route is known.
    ///
    /// # Errors
    /// Returns the [`Refusal`] to respond with if the request was not forwarded.
    pub async fn pass(
        &self,
        request: Request<Upload>,
        to: &Destination,
        held: impl Send + 'static,
        ticket: impl Send,
    ) -> Result<Response<Body>, Refusal> {
        if to.port == ENVD_PORT {
            let path = request.uri().path();
            if internal::is_internal(path) {
                let path = path.to_owned();
                return Err(Refusal::Internal { path });
            }
            if let Some(answer) = cors::preflight(request.method(), request.headers()) {
                return Ok(answer);
            }
        }
        let has_origin = request.headers().contains_key(header::ORIGIN);
        let mut request = request;
        let span = traces::begin(request.headers());
        let method = span.as_ref().map(|_| request.method().clone());
        if let Some(span) = &span {
            span.pass_on(request.headers_mut());
        }
        let sent = self.send(request, to, held, ticket).await;
        if let (Some(span), Some(method)) = (span, method) {
            // Until the head of the response, because a stream may be open for hours.
            let status = sent.as_ref().map_or(502, |answer| answer.status().as_u16());
            let place = vec![
                ("cube.sandbox", traces::Value::Text(to.id.to_string())),
                ("cube.port", traces::Value::Number(to.port.into())),
            ];
            span.end(format!("{method} sandbox"), status, place);
        }
        let mut response = sent?;
        if has_origin && to.port == ENVD_PORT {
            cors::open(response.headers_mut());
        }
        Ok(response)
    }

    async fn route(&self, id: &SandboxId) -> Result<Route, Refusal> {
        let id = id.clone();
        self.routes.route(&id).await.map_err(|error| match error {
            RouteError::NotFound => Refusal::NotFound { id },
            RouteError::Unavailable(_) => Refusal::Unavailable {
                id,
                message: error.to_string(),
            },
        })
    }

    async fn send(
        &self,
        mut request: Request<Upload>,
        to: &Destination,
        held: impl Send + 'static,
        ticket: impl Send,
    ) -> Result<Response<Body>, Refusal> {
        let mut ticket = Some(ticket);
        let client = hyper::upgrade::on(&mut request);
        let (asked, mut body) = request.into_parts();
        let upgrade = if to.port != ENVD_PORT && body.is_end_stream() {
            head::upgrade(&asked)
        } else {
            None
        };
        let progress = body.progress();
        let mut tries = 0;
        loop {
            tries += 1;
            let route = self.route(&to.id).await?;
            drop(ticket.take());
            access::check(&route, to.port, asked.uri.path(), &asked.headers)?;
            let permit = self.admit(&route)?;
            self.routes.reached(&route);
            let mut parts = asked.clone();
            head::to_sandbox(&mut parts, &to.host, &route, to.port, upgrade.clone());
            let request = Request::from_parts(parts, body);
            let failed = match exchange::exchange(request, &route, to.port, &permit).await {
                Ok((response, sender)) => {
                    let upgrade_parts = UpgradeParts { client, held };
                    return match upgrade {
                        Some(_) => upgraded(response, sender, permit, progress, upgrade_parts, to),
                        None => answered(response, sender, permit, progress, to),
                    };
                }
                Err(failed) => failed,
            };
            tracing::debug!(sandbox = %to.id, port = to.port, cause = %failed.cause, "request not forwarded");
            if progress.is_stalled() {
                return Err(Refusal::Stalled);
            }
            let is_gone = failed.cause.means_gone();
            let now = self.route_after(&route, is_gone).await?;
            let is_same = now.generation == route.generation;
            body = match failed.unsent {
                Some(unsent) if !is_same && tries < TRIES => unsent.into_body(),
                _ => return Err(closed(to, is_gone && is_same)),
            };
        }
    }

    /// The route after a request that was not forwarded. With `is_gone`, the VM refuses connections. This then waits
    /// until the VM's process has exited and the sandbox's owner has noticed it. Otherwise a client that knows of the
    /// end could still change the sandbox's timeout.
    async fn route_after(&self, route: &Route, is_gone: bool) -> Result<Route, Refusal> {
        let deadline = Instant::now() + END_LIMIT;
        loop {
            let now = match self.route(&route.id).await {
                // If the sandboxes were handed over in the meantime, this process has no route.
                Err(Refusal::Unavailable { .. }) => return Ok(route.clone()),
                now => now?,
            };
            if !is_gone || now.generation != route.generation {
                return Ok(now);
            }
            if Instant::now() >= deadline {
                tracing::warn!(sandbox = %route.id, "the VM refuses connections, but its process has not ended");
                return Ok(now);
            }
            tokio::time::sleep(END_STEP).await;
        }
    }

    fn admit(&self, route: &Route) -> Result<RequestPermit, Refusal> {
        let permit = self.connections.admit(&route.id, route.generation);
        permit.map_err(|limit| Refusal::TooMany {
            id: route.id.clone(),
            limit,
        })
    }
}

/// The client's side of a connection that may be upgraded, and the value to keep until it ends.
struct UpgradeParts<H> {
    client: OnUpgrade,
    held: H,
}

/// `is_gone`: the VM's socket refuses connections, so the VM has ended, even if the registry still has a route to it.
fn closed(to: &Destination, is_gone: bool) -> Refusal {
    let id = to.id.clone();
    if is_gone {
        Refusal::NotFound { id }
    } else {
        Refusal::PortClosed { id, port: to.port }
    }
}

fn answered(
    response: Response<Incoming>,
    sender: Sender,
    permit: RequestPermit,
    progress: Progress,
    to: &Destination,
) -> Result<Response<Body>, Refusal> {
    let (mut parts, body) = response.into_parts();
    // `101` violates the protocol here: the request did not ask for an upgrade.
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(closed(to, false));
    }
    head::to_client(&mut parts);
    let held = Held {
        permit,
        sender,
        progress,
        reuse: if to.port == ENVD_PORT {
            Reuse::Keep
        } else {
            Reuse::Close
        },
    };
    Ok(Response::from_parts(
        parts,
        Body::new(Reply::new(body, held)),
    ))
}

fn upgraded<H: Send + 'static>(
    mut response: Response<Incoming>,
    sender: Sender,
    permit: RequestPermit,
    progress: Progress,
    upgrade_parts: UpgradeParts<H>,
    to: &Destination,
) -> Result<Response<Body>, Refusal> {
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return answered(response, sender, permit, progress, to);
    }
    let sandbox = hyper::upgrade::on(&mut response);
    let (mut parts, _) = response.into_parts();
    head::to_client(&mut parts);
    tunnel::join(upgrade_parts.client, sandbox, (permit, upgrade_parts.held));
    Ok(Response::from_parts(parts, Body::empty()))
}
