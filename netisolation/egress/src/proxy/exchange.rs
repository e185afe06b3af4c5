//! One request: the proxy requests the rule, replaces the headers, and returns the server's response.

use std::sync::Arc;

use egress::framing::Violation;
use hyper::{
    Request, Response, StatusCode, Uri, Version,
    body::Incoming,
    ext::on_informational,
    header::{EXPECT, HOST, HeaderName, HeaderValue},
    http::request::Parts,
    upgrade::{self, OnUpgrade},
};

use super::{
    answer::Refusal,
    body::{ContinueWait, ToGuest, ToServer},
    head::{self, RuleHeaders, Ruled, Switch},
    record::Record,
    session::{Security, Session},
    target::{self, Target},
    tunnel,
    upstream::Protocol,
};

/// Responds to a request of the session. Each exit path creates a record.
pub(crate) async fn answer(session: &Session, request: Request<Incoming>) -> Response<ToGuest> {
    let mut record = Record::new(&session.shared.link, &session.flow);
    record.request(request.method(), request.uri().path());
    let mut rule = None;
    match serve(session, request, &mut record, &mut rule).await {
        Ok(Served { response, switched }) => {
            record.status(response.status());
            let (mut parts, body) = response.into_parts();
            if session.upstream.protocol() == Protocol::Http1 {
                // The guest's connection is not of an old server's version.
                parts.version = Version::HTTP_11;
            }
            match switched {
                Some((guest, server)) => {
                    session.tunnel(tunnel::run(guest, server, record));
                    head::of_server(&mut parts.headers);
                    head::switch(&mut parts.headers);
                    Response::from_parts(parts, ToGuest::text(hyper::body::Bytes::new()))
                }
                None => {
                    head::of_server(&mut parts.headers);
                    Response::from_parts(parts, ToGuest::server(body, record))
                }
            }
        }
        Err(refusal) => {
            record.status(refusal.status);
            record.refused(&refusal.reason);
            refusal.response(
                rule.as_deref(),
                session.upstream.protocol() == Protocol::Http1,
            )
        }
    }
}

struct Served {
    response: Response<Incoming>,
    /// The guest's and the server's side, if they have switched to WebSocket.
    switched: Option<(OnUpgrade, OnUpgrade)>,
}

async fn serve(
    session: &Session,
    mut request: Request<Incoming>,
    record: &mut Record,
    rule: &mut Option<String>,
) -> Result<Served, Refusal> {
    let guest = upgrade::on(&mut request);
    let (mut parts, body) = request.into_parts();
    let target = checked(session, &parts, record)?;
    let ruled = rule_headers(session, &target, record, rule).await?;
    let switch = head::of_guest(&mut parts);
    let names = ruled.names();
    ruled.apply(&mut parts.headers);
    address(session, &mut parts, &target)?;
    let request = outgoing(session, parts, body, names, record);
    let response = session.upstream.send(&target.name, request).await;
    let mut response =
        response.map_err(|error| Refusal::passing(StatusCode::BAD_GATEWAY, error.to_string()))?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let switched = None;
        return Ok(Served { response, switched });
    }
    if switch == Switch::None || !head::is_websocket(response.headers()) {
        let reason = "the server switched to a protocol that was not requested";
        return Err(Refusal::closing(StatusCode::BAD_GATEWAY, reason));
    }
    let switched = Some((guest, upgrade::on(&mut response)));
    Ok(Served { response, switched })
}

/// All checks that need no request to `cube-api`.
fn checked(session: &Session, request: &Parts, record: &mut Record) -> Result<Target, Refusal> {
    if !session.membership.take_request() {
        let reason = "the sandbox sends too many requests";
        return Err(Refusal::passing(StatusCode::TOO_MANY_REQUESTS, reason));
    }
    if let Some(violation) = session.framed.violation() {
        let status = match violation {
            Violation::TooLong => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        };
        return Err(Refusal::closing(status, violation.to_string()));
    }
    let port = session.flow.remote.port();
    let target = target::of_request(request, session.security.scheme(), port)?;
    record.name(target.name.as_str());
    let admitted = match &session.security {
        Security::Tls { name } => target.name == *name,
        Security::Plain => session.is_answered(&target.name) || session.flow.admitted_by_address,
    };
    if !admitted {
        let reason = match &session.security {
            Security::Tls { name } => format!(
                "the request is for {}, but the connection is for {name}",
                target.name
            ),
            Security::Plain => format!("{} was not resolved to this address", target.name),
        };
        return Err(Refusal::closing(StatusCode::MISDIRECTED_REQUEST, reason));
    }
    Ok(target)
}

/// The rule's headers. Only a name that was resolved to the flow's address can have headers.
async fn rule_headers(
    session: &Session,
    target: &Target,
    record: &mut Record,
    rule: &mut Option<String>,
) -> Result<Ruled, Refusal> {
    if !session.is_answered(&target.name) {
        return Ok(Ruled::none());
    }
    let link = &session.shared.link;
    let ask = session.security.ask();
    let outcome = link.rule(session.peer, &target.name, ask).await;
    let outcome = outcome.map_err(|error| {
        let reason = format!("the rule for {} is not known: {error}", target.name);
        Refusal::closing(StatusCode::SERVICE_UNAVAILABLE, reason)
    })?;
    let found = RuleHeaders::new(outcome);
    if let Some(key) = found.rule {
        record.rule(&key, found.secrets);
        *rule = Some(key);
    }
    found.headers
}

/// Writes the target in the form of the server's HTTP version.
fn address(session: &Session, request: &mut Parts, target: &Target) -> Result<(), Refusal> {
    let bad = || Refusal::closing(StatusCode::BAD_REQUEST, "the request's target is invalid");
    let authority = target.authority();
    let path = match request.uri.path_and_query() {
        Some(path) => path.as_str().to_owned(),
        None => "/".to_owned(),
    };
    match session.upstream.protocol() {
        Protocol::Http1 => {
            request.version = Version::HTTP_11;
            request.uri = path.parse().map_err(|_| bad())?;
            let host = HeaderValue::from_str(&authority).map_err(|_| bad())?;
            request.headers.insert(HOST, host);
        }
        Protocol::Http2 => {
            request.version = Version::HTTP_2;
            request.headers.remove(HOST);
            request.headers.remove(EXPECT);
            let uri = Uri::builder().scheme(session.security.scheme());
            let uri = uri
                .authority(authority.as_str())
                .path_and_query(path)
                .build();
            request.uri = uri.map_err(|_| bad())?;
        }
    }
    Ok(())
}

fn outgoing(
    session: &Session,
    parts: Parts,
    body: Incoming,
    ruled: Vec<HeaderName>,
    record: &Record,
) -> Request<ToServer> {
    let waits =
        parts.headers.contains_key(EXPECT) && session.upstream.protocol() == Protocol::Http1;
    let (continue_, wait) = waits.then(ContinueWait::new).unzip();
    let body = ToServer::new(body, record.traffic(), ruled, wait);
    let mut request = Request::from_parts(parts, body);
    if let Some(continue_) = continue_ {
        let continue_ = Arc::new(std::sync::Mutex::new(Some(continue_)));
        on_informational(&mut request, move |response| {
            if response.status() == StatusCode::CONTINUE
                && let Ok(mut continue_) = continue_.lock()
                && let Some(continue_) = continue_.take()
            {
                // The body may already be gone.
                let _ = continue_.send(());
            }
        });
    }
    request
}
