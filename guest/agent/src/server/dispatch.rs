//! From a request to its handler: the agent as a service of [`transport`].

use std::time::Instant;

use envd::{ErrorBody, Framing};
use nix::sys::epoll::EpollFlags;
use transport::{Admission, After, Key, Reactor, Refusal, Service, http};

use super::{
    call,
    codec::Codec,
    core::{Conn, Conns, Core, Job, Source},
    files, filesystem, freeze,
    head::{AgentFields, Head},
    init,
    process::{self, follow, input, signals},
    route::{self, NoRoute, Route},
    secret::is_same_secret,
    tunnel, watch,
};

/// Clients compare this text.
const UNAUTHORIZED: &str = "unauthorized access, please provide a valid access token or method \
                            signing if supported";

impl Service for Core {
    type Fields = AgentFields;
    type Call = Codec;

    const MAX_CONNS: usize = 1024;
    const MAX_BODY: usize = 4 << 20;

    #[inline]
    fn reactor(&mut self) -> &mut Reactor {
        &mut self.io
    }

    fn admit(&mut self, key: Key, conn: &mut Conn, head: &Head, body: &Framing) -> Admission<Self> {
        let route = match route::find(&head.method, &head.path) {
            Ok(route) => route,
            Err(NoRoute::NotFound) => return refuse(404, "no such route"),
            Err(NoRoute::MethodNotAllowed) => return refuse(405, "method not allowed"),
        };
        if !route.is_open() && !self.settings.initialised {
            return refuse(503, "the sandbox has not been given its identity yet");
        }
        let admitted = match route {
            Route::ReadFile | Route::WriteFile => files::admit(self, head),
            _ if !route.needs_token() => Ok(()),
            _ if is_same_secret(&self.settings.access_token, &head.fields.access_token) => Ok(()),
            _ => Err(UNAUTHORIZED),
        };
        if let Err(message) = admitted {
            return refuse(401, message);
        }
        match route {
            Route::StreamInput => input::begin(conn, head, body),
            Route::Tunnel => tunnel::begin(self, key, conn, &head.path),
            Route::WriteFile => {
                return match files::write(self, head) {
                    Ok(upload) => Admission::Receive(Box::new(upload)),
                    Err(error) => refuse(error.status, &error.message),
                };
            }
            _ => return Admission::Handle,
        }
        Admission::Begun
    }

    fn handle(&mut self, key: Key, conn: &mut Conn, head: &Head, body: &[u8]) {
        let Ok(route) = route::find(&head.method, &head.path) else {
            return conn.error(404, "no such route");
        };
        match route {
            Route::Health => conn.answer(204, "", b""),
            Route::Init => init::init(self, conn, body),
            Route::Freeze => freeze::freeze(self, conn),
            Route::Thaw => freeze::thaw(self, conn),
            Route::Envs => {
                let json = serde_json::to_vec(&self.environment()).unwrap_or_default();
                conn.answer(200, http::JSON, &json);
            }
            Route::Metrics => match self.meter.read() {
                Ok(metrics) => {
                    let json = serde_json::to_vec(&metrics).unwrap_or_default();
                    conn.answer(200, http::JSON, &json);
                }
                Err(error) => conn.error(500, &format!("cannot read metrics: {error}")),
            },
            Route::ReadFile => files::read(self, conn, head),
            // `admit` handles these.
            Route::WriteFile | Route::Tunnel | Route::StreamInput => {
                conn.error(500, "the request's body was read by the wrong handler");
            }
            Route::ProcessStream(method) => process::stream(self, key, conn, method, head, body),
            Route::Process(method) => process::unary(self, key, conn, method, head, body),
            Route::Filesystem(method) => filesystem::unary(self, conn, method, head, body),
            Route::WatchDir => watch::stream::begin(self, key, conn, head, body),
            Route::UnknownRpc => call::unknown(conn, head),
        }
    }

    fn push_error(out: &mut Vec<u8>, status: u16, message: &str, after: After) {
        let body = ErrorBody {
            code: status,
            message: message.to_owned(),
        };
        let body = serde_json::to_vec(&body).unwrap_or_default();
        http::push_answer(out, status, http::JSON, &body, after);
    }

    fn ready(&mut self, source: u8, key: Key, flags: EpollFlags) {
        match Source::find(source) {
            Some(Source::Signals) => signals::read(self),
            Some(Source::Stdin) => follow::stdin_ready(self, key),
            Some(Source::Stdout) => follow::output_ready(self, key, 0, flags),
            Some(Source::Stderr) => follow::output_ready(self, key, 1, flags),
            Some(Source::Watch) => watch::ready(self, key),
            None => {}
        }
    }

    fn work(&mut self, conns: &mut Conns, kind: u8, key: Key) {
        if kind == Job::Process as u8 {
            follow::pump(self, conns, key);
        } else {
            watch::stream::pump(self, conns, key);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.processes.iter().filter_map(|(_, p)| p.deadline).min()
    }

    fn expire(&mut self, conns: &mut Conns, now: Instant) {
        follow::expire(self, conns, now);
    }

    fn is_ending(&self) -> bool {
        self.ending
    }
}

#[cold]
#[inline(never)]
fn refuse(status: u16, message: &str) -> Admission<Core> {
    Admission::Refuse(Refusal {
        status,
        message: message.to_owned(),
    })
}
