//! The steps of a connection: parses requests, passes them to the service, and sends the responses.

use std::time::{Duration, Instant};

use envd::{Decoded, Framing};

use crate::{
    conn::{Conn, Gone, Phase, Rest},
    http::{self, After, Head},
    reactor::Work,
    service::{Admission, Refusal, Service, Step},
    slots::Key,
};

/// Number of steps that one connection or descriptor may repeat before the others get a turn.
pub const ROUNDS: usize = 16;
/// Time limit for the rest of a head after its first bytes, for each further piece of a body, and for draining a
/// refused request.
const PATIENCE: Duration = Duration::from_secs(30);
/// Largest number of bytes of a refused request that are read and discarded before its connection is closed.
const DRAIN: usize = 1 << 20;

/// Runs the steps of a connection until it must wait, or has used up its [`ROUNDS`] and is queued again.
pub(crate) fn pump<S: Service>(service: &mut S, key: Key, conn: &mut Conn<S>) -> Result<(), Gone> {
    let mut rounds = 0;
    loop {
        conn.flush()?;
        match step(service, key, conn)? {
            Step::Again if rounds == ROUNDS => {
                service.reactor().enqueue(Work::Conn(key));
                break;
            }
            Step::Again => rounds += 1,
            Step::Wait => break,
        }
    }
    conn.flush()?;
    if conn.writable || conn.watches_room {
        return Ok(());
    }
    conn.watch_room(key, service.reactor())
}

fn step<S: Service>(service: &mut S, key: Key, conn: &mut Conn<S>) -> Result<Step, Gone> {
    let backlog = conn.backlog();
    match &mut conn.phase {
        // No further request is read before the client has received earlier responses.
        Phase::Head | Phase::Collect { .. } | Phase::Receive { .. } if backlog > 0 => {
            Ok(Step::Wait)
        }
        Phase::Head => read_head(service, key, conn),
        Phase::Collect { .. } | Phase::Receive { .. } => read_body(service, key, conn),
        Phase::Exchange(exchange) => {
            let mut exchange = exchange.take().ok_or(Gone)?;
            let step = exchange.step(service, key, conn);
            conn.put_back(exchange);
            step
        }
        Phase::Closing(_) if backlog > 0 => Ok(Step::Wait),
        Phase::Closing(Rest::Read) => Err(Gone),
        Phase::Closing(Rest::Unread) => {
            conn.shut_down();
            conn.input = Vec::new();
            conn.wake = Some(Instant::now() + PATIENCE);
            conn.phase = Phase::Draining { left: DRAIN };
            Ok(Step::Again)
        }
        Phase::Draining { .. } => drain(service, conn),
    }
}

#[inline(never)]
fn drain<S: Service>(service: &mut S, conn: &mut Conn<S>) -> Result<Step, Gone> {
    if !conn.fill(&mut service.reactor().scratch)? {
        return Ok(Step::Wait);
    }
    let received = conn.input.len();
    conn.consume(received);
    match &mut conn.phase {
        Phase::Draining { left } if *left > received => *left -= received,
        _ => return Err(Gone),
    }
    Ok(Step::Again)
}

fn read_head<S: Service>(service: &mut S, key: Key, conn: &mut Conn<S>) -> Result<Step, Gone> {
    let parsed = if conn.input.is_empty() {
        Ok(None)
    } else {
        http::parse(&conn.input)
    };
    match parsed {
        Ok(Some((head, body, used))) => {
            conn.consume(used);
            conn.wake = None;
            conn.after = if head.close {
                After::Close
            } else {
                After::KeepAlive
            };
            begin(service, key, conn, head, body);
            Ok(Step::Again)
        }
        Ok(None) => {
            if !conn.fill(&mut service.reactor().scratch)? {
                if !conn.input.is_empty() && conn.wake.is_none() {
                    conn.wake = Some(Instant::now() + PATIENCE);
                }
                return Ok(Step::Wait);
            }
            Ok(Step::Again)
        }
        Err(bad) => {
            conn.refuse(bad.status, bad.message);
            Ok(Step::Again)
        }
    }
}

/// Asks the service how to handle a request whose head has arrived, and begins to do so.
fn begin<S: Service>(
    service: &mut S,
    key: Key,
    conn: &mut Conn<S>,
    head: Head<S::Fields>,
    body: Framing,
) {
    match service.admit(key, conn, &head, &body) {
        Admission::Begun => {}
        Admission::Refuse(refusal) => refuse(conn, &body, &refusal),
        Admission::Receive(sink) => {
            conn.invite_body(&head);
            conn.phase = Phase::Receive { sink, body };
        }
        Admission::Handle => match body {
            Framing::Length(len) => match usize::try_from(len) {
                Ok(len) if len <= S::MAX_BODY && len <= conn.input.len() => {
                    handle_in_place(service, key, conn, &head, len);
                }
                Ok(len) if len <= S::MAX_BODY => collect(conn, head, body),
                Ok(_) | Err(_) => refuse(conn, &body, &too_large()),
            },
            Framing::Chunked(_) => collect(conn, head, body),
        },
    }
}

/// Handles a request whose whole body has arrived together with its head.
fn handle_in_place<S: Service>(
    service: &mut S,
    key: Key,
    conn: &mut Conn<S>,
    head: &Head<S::Fields>,
    len: usize,
) {
    let input = std::mem::take(&mut conn.input);
    service.handle(key, conn, head, input.get(..len).unwrap_or_default());
    conn.input = input;
    conn.consume(len);
}

fn collect<S: Service>(conn: &mut Conn<S>, head: Head<S::Fields>, body: Framing) {
    conn.invite_body(&head);
    conn.phase = Phase::Collect {
        head: Box::new(head),
        body,
        bytes: Vec::new(),
    };
}

#[cold]
fn too_large() -> Refusal {
    Refusal {
        status: 413,
        message: "the request's body is too large".to_owned(),
    }
}

#[cold]
#[inline(never)]
fn refuse<S: Service>(conn: &mut Conn<S>, body: &Framing, refusal: &Refusal) {
    if skip_body(conn, body) {
        conn.error(refusal.status, &refusal.message);
    } else {
        conn.refuse(refusal.status, &refusal.message);
    }
}

/// Discards the body if all of it has arrived. Returns false otherwise, and for every chunked body: the connection then
/// cannot serve another request.
fn skip_body<S: Service>(conn: &mut Conn<S>, body: &Framing) -> bool {
    match body {
        Framing::Chunked(_) => false,
        Framing::Length(len) => match usize::try_from(*len) {
            Ok(len) if len <= conn.input.len() => {
                conn.consume(len);
                true
            }
            Ok(_) | Err(_) => false,
        },
    }
}

/// Whether a body is complete after the bytes received so far.
enum Progress {
    More,
    Whole,
    Refused(Refusal),
}

fn read_body<S: Service>(service: &mut S, key: Key, conn: &mut Conn<S>) -> Result<Step, Gone> {
    let (progress, used) = take_body(conn);
    conn.consume(used);
    match progress {
        Progress::Whole => finish_body(service, key, conn),
        Progress::Refused(refusal) => conn.refuse(refusal.status, &refusal.message),
        Progress::More => {
            conn.wake = Some(Instant::now() + PATIENCE);
            if !conn.fill(&mut service.reactor().scratch)? {
                return Ok(Step::Wait);
            }
        }
    }
    Ok(Step::Again)
}

/// Moves the received part of a body to its destination. Returns the progress and the number of input bytes consumed.
fn take_body<S: Service>(conn: &mut Conn<S>) -> (Progress, usize) {
    let (Phase::Collect { body, .. } | Phase::Receive { body, .. }) = &mut conn.phase else {
        return (Progress::More, 0);
    };
    let mut body = std::mem::replace(body, Framing::Length(0));
    let input = std::mem::take(&mut conn.input);
    let mut rest = input.as_slice();
    let progress = loop {
        match body.next(&mut rest) {
            Err(error) => {
                break Progress::Refused(Refusal {
                    status: 400,
                    message: error.to_string(),
                });
            }
            Ok(Decoded::More) => break Progress::More,
            Ok(Decoded::End) => break Progress::Whole,
            Ok(Decoded::Data(data)) => {
                if let Err(refusal) = store(&mut conn.phase, data) {
                    break Progress::Refused(refusal);
                }
            }
        }
    };
    let used = input.len() - rest.len();
    conn.input = input;
    if let Phase::Collect { body: place, .. } | Phase::Receive { body: place, .. } = &mut conn.phase
    {
        *place = body;
    }
    (progress, used)
}

fn store<S: Service>(phase: &mut Phase<S>, data: &[u8]) -> Result<(), Refusal> {
    match phase {
        Phase::Receive { sink, .. } => sink.write(data),
        Phase::Collect { bytes, .. } if bytes.len() + data.len() > S::MAX_BODY => Err(too_large()),
        Phase::Collect { bytes, .. } => {
            bytes.extend_from_slice(data);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn finish_body<S: Service>(service: &mut S, key: Key, conn: &mut Conn<S>) {
    conn.wake = None;
    match std::mem::replace(&mut conn.phase, Phase::Head) {
        Phase::Collect { head, bytes, .. } => service.handle(key, conn, &head, &bytes),
        Phase::Receive { sink, .. } => sink.finish(service, conn),
        other => conn.phase = other,
    }
}
