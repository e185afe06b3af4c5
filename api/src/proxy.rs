//! The data plane: passes requests on to ports of sandboxes.
//!
//! ```text
//! target ─► internal, cors ─► routes (resumes) ─► access ─► lane ─► head ─► connection ─► reply
//!                                                                                      └─ 101 ─► tunnel
//! ```
//! Both sides speak HTTP/1.1 (clients HTTP/2 too), each message is parsed and written anew, so nothing that
//! one side takes for the end of a message can be something else to the other. Bodies go frame by frame:
//! whoever reads slowly slows the other down, and what waits here is bounded. There is no time limit on
//! answers and streams, but on their number for each sandbox.
//!
//! What must never happen: a request reaching the agent's internal routes; code run without the token of a secure
//! sandbox; a request sent a second time that
//! the sandbox may have seen; a broken body that ends as if it were whole; a connection of one VM used for
//! another.

mod access;
mod cors;
mod exchange;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod head;
mod internal;
mod lanes;
mod refusal;
mod reply;
mod routes;
mod target;
mod tunnel;
mod upload;
mod upstream;

use api_types::envd::ENVD_PORT;
use axum::body::Body;
use axum::http::{HeaderName, Request, Response, StatusCode, header};
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use model::SandboxId;

pub use lanes::IN_FLIGHT_MAX;
pub use refusal::{Form, Refusal};
pub use routes::Routes;
pub use target::{Hosts, SANDBOX_ID, SANDBOX_PORT, Target, TargetError, host};
pub use upload::{Progress, Upload, UploadError};

use crate::registry::{Route, RouteError};
use lanes::{Lanes, Pass};
use reply::{Again, Held, Reply};
use upstream::Sender;

/// Opens ports that are not public.
const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
/// How often a request is routed: once more when the VM has been replaced in between.
const TRIES: usize = 2;

/// Passes requests on.
#[derive(Clone, Debug)]
pub struct Proxy<R> {
    routes: R,
    lanes: Lanes,
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Destination {
    /// Which sandbox.
    pub id: SandboxId,
    /// Which of its ports.
    pub port: u16,
    /// What the client calls it.
    pub host: String,
}

impl<R: Routes> Proxy<R> {
    /// Asks `routes` for the way.
    pub fn new(routes: R) -> Self {
        let lanes = Lanes::default();
        Self { routes, lanes }
    }

    /// Who knows the way.
    pub fn routes(&self) -> &R {
        &self.routes
    }

    /// Drops connections that have waited too long, for ever.
    pub async fn tend(&self) {
        self.lanes.tend().await;
    }

    /// Passes a request on. `held` is kept for as long as an upgraded connection lasts.
    ///
    /// # Errors
    /// Why it was not passed on; see [`Refusal`].
    pub async fn pass(
        &self,
        request: Request<Upload>,
        to: &Destination,
        held: impl Send + 'static,
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
        let mut response = self.send(request, to, held).await?;
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
    ) -> Result<Response<Body>, Refusal> {
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
            access::check(&route, to.port, asked.uri.path(), &asked.headers)?;
            let pass = self.enter(&route)?;
            let mut parts = asked.clone();
            head::to_sandbox(&mut parts, &to.host, &route, to.port, upgrade.clone());
            let request = Request::from_parts(parts, body);
            let failed = match exchange::exchange(request, &route, to.port, &pass).await {
                Ok((response, sender)) => {
                    let lasting = Lasting { client, held };
                    return match upgrade {
                        Some(_) => upgraded(response, sender, pass, progress, lasting, to),
                        None => answered(response, sender, pass, progress, to),
                    };
                }
                Err(failed) => failed,
            };
            tracing::debug!(sandbox = %to.id, port = to.port, cause = %failed.cause, "not passed on");
            if progress.is_stalled() {
                return Err(Refusal::Stalled);
            }
            let now = self.route(&to.id).await?;
            let is_same = now.generation == route.generation;
            body = match failed.unsent {
                Some(unsent) if !is_same && tries < TRIES => unsent.into_body(),
                _ => return Err(closed(to, failed.cause.means_gone() && is_same)),
            };
        }
    }

    fn enter(&self, route: &Route) -> Result<Pass, Refusal> {
        let pass = self.lanes.enter(&route.id, route.generation);
        pass.map_err(|limit| Refusal::TooMany {
            id: route.id.clone(),
            limit,
        })
    }
}

/// What an upgraded connection needs.
struct Lasting<H> {
    client: OnUpgrade,
    held: H,
}

/// A VM whose socket nobody serves has ended, also when the registry has not heard of it yet.
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
    pass: Pass,
    progress: Progress,
    to: &Destination,
) -> Result<Response<Body>, Refusal> {
    let (mut parts, body) = response.into_parts();
    // Nobody has asked for another protocol.
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(closed(to, false));
    }
    head::to_client(&mut parts);
    let held = Held {
        pass,
        sender,
        progress,
        again: if to.port == ENVD_PORT {
            Again::Keep
        } else {
            Again::Drop
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
    pass: Pass,
    progress: Progress,
    lasting: Lasting<H>,
    to: &Destination,
) -> Result<Response<Body>, Refusal> {
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return answered(response, sender, pass, progress, to);
    }
    let sandbox = hyper::upgrade::on(&mut response);
    let (mut parts, _) = response.into_parts();
    head::to_client(&mut parts);
    tunnel::join(lasting.client, sandbox, pass, lasting.held);
    Ok(Response::from_parts(parts, Body::empty()))
}
