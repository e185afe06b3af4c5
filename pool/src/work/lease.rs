//! A lease on a warm slot: resume the VM and tell the agent whose it is. This is what a caller waits for, so
//! both messages are sent before an answer is awaited, and nothing is looked up or made.

use std::{io, os::unix::net::UnixStream as StdStream, time::Duration};

use api_types::guest_text;
use model::{SandboxId, StartPhase, Timeline};
use netisolation::Isolation;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};
use vmm_control::{Call, Failure, Reply, Request, frame};

use super::{Card, Who, WorkError, init_request, wall_clock};
use crate::{
    host,
    record::{Durability, Kept, Record, SlotDir},
};

/// More of an answer's head is not read.
const MAX_HEAD: usize = 4096;

/// The open connections of a slot.
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) control: UnixStream,
    pub(crate) agent: UnixStream,
}

impl Lines {
    /// Of a VM that was just made. Needs a runtime around it.
    pub(crate) fn new(control: StdStream, agent: StdStream) -> io::Result<Self> {
        control.set_nonblocking(true)?;
        agent.set_nonblocking(true)?;
        Ok(Self {
            control: UnixStream::from_std(control)?,
            agent: UnixStream::from_std(agent)?,
        })
    }
}

/// What a lease needs.
#[derive(Debug)]
pub(crate) struct LeasePlan {
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    pub(crate) network: Option<Isolation>,
    /// With the lease's settings.
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) timeout: Duration,
}

/// A slot that is leased.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) lines: Lines,
}

/// See the module.
pub(crate) async fn serve(mut plan: LeasePlan, mut lines: Lines) -> Result<Served, WorkError> {
    let bound = plan.timeout;
    // Before the guest runs. A server that dies here leaves a record that says that the VM is nobody's.
    if let (Some(network), Some(tap)) = (&plan.network, plan.record.tap) {
        network
            .confine(tap, &plan.id, &plan.record.policy)
            .map_err(|e| WorkError::Network("confine the sandbox", e))?;
        plan.timeline
            .stamp(StartPhase::Confined, host::monotonic_ns());
    }
    silent(&lines.agent)?;
    // Last, for the time that is in it.
    let sent_ns = host::monotonic_ns();
    let card = Card::of(plan.record.tap.as_ref());
    let init = init_request(&Who::Same, &plan.record.init, card)
        .map_err(|e| WorkError::Io("draw random bytes", e))?;
    let init = http_request(&init)?;
    let work = async {
        let resume = frame::encode(&Call::from(Request::Resume))
            .map_err(|e| WorkError::Io("encode a request", io::Error::other(e)))?;
        let vmm = |e| WorkError::Io("resume the VM", e);
        lines.control.write_all(&resume).await.map_err(vmm)?;
        let sent = lines.agent.write_all(&init).await;
        sent.map_err(|e| WorkError::Io("tell the guest agent", e))?;
        // The guest is at it; the record is written meanwhile. It is a small file in the page cache: handing it to
        // another thread costs more.
        plan.record.kept = Kept::Running;
        plan.record.warm = true;
        plan.dir
            .write(&plan.record, Durability::Process)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))?;
        resumed(&mut lines.control).await?;
        plan.timeline
            .stamp(StartPhase::Resumed, host::monotonic_ns());
        told(&mut lines.agent).await?;
        let now_ns = host::monotonic_ns();
        plan.timeline.stamp(StartPhase::AgentReady, now_ns);
        if wall_clock::may_be_late(sent_ns, now_ns) {
            wall_clock::tell_again(&lines.agent, bound);
        }
        Ok(())
    };
    timeout(bound, work)
        .await
        .map_err(|_| WorkError::Timeout(bound))??;
    Ok(Served {
        record: plan.record,
        timeline: plan.timeline,
        lines,
    })
}

/// `POST /init`, whole.
pub(super) fn http_request(init: &api_types::envd::InitRequest) -> Result<Vec<u8>, WorkError> {
    let body = serde_json::to_vec(init)
        .map_err(|e| WorkError::Io("encode a request", io::Error::other(e)))?;
    let mut request = format!(
        "POST /init HTTP/1.1\r\nHost: guest\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(&body);
    Ok(request)
}

/// The VMM's answer to `resume`.
async fn resumed(control: &mut UnixStream) -> Result<(), WorkError> {
    let failed = |e| WorkError::Io("resume the VM", e);
    let mut header = [0; frame::HEADER];
    control.read_exact(&mut header).await.map_err(failed)?;
    let len = frame::check_header(&header).map_err(|e| failed(io::Error::other(e)))?;
    let mut body = vec![0; len];
    control.read_exact(&mut body).await.map_err(failed)?;
    let answer: Result<Reply, Failure> =
        serde_json::from_slice(&body).map_err(|e| failed(io::Error::other(e)))?;
    match answer {
        Ok(_) => Ok(()),
        Err(e) => Err(failed(io::Error::other(e))),
    }
}

/// Whether the agent has kept quiet since its last answer: one that has not could answer before it is asked.
fn silent(agent: &UnixStream) -> Result<(), WorkError> {
    match agent.try_read(&mut [0]) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(e) => Err(WorkError::Io("hear the guest agent", e)),
        Ok(0) => Err(WorkError::Io(
            "hear the guest agent",
            io::ErrorKind::UnexpectedEof.into(),
        )),
        Ok(_) => Err(WorkError::Early),
    }
}

/// The agent's answer to `/init`, which has no body when it is good.
pub(super) async fn told(agent: &mut UnixStream) -> Result<(), WorkError> {
    let mut head = Vec::with_capacity(256);
    let mut piece = [0; 512];
    loop {
        let n = agent
            .read(&mut piece)
            .await
            .map_err(|e| WorkError::Io("hear the guest agent", e))?;
        head.extend_from_slice(&piece[..n]);
        let whole = head.windows(4).position(|w| w == b"\r\n\r\n");
        if whole.is_none() && n > 0 && head.len() < MAX_HEAD {
            continue;
        }
        let is_good = head.starts_with(b"HTTP/1.1 2") && whole == head.len().checked_sub(4);
        return if is_good {
            Ok(())
        } else {
            Err(WorkError::Answer(guest_text(&String::from_utf8_lossy(
                &head,
            ))))
        };
    }
}
