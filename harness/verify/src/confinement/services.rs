//! Cases for the other programs that read bytes from guests and strangers: the egress proxy and the image
//! converter. Each attempt is made in a new process that has confined itself and waits for its first bytes.

use std::{
    io::{self, IoSlice, Write},
    net::TcpListener,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{OFlag, open},
    sys::{
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
        },
        stat::Mode,
    },
};
use pki::{Authority, KeyPair};
use serde_json::json;
use testbed::artifacts;

use super::{
    ConfinementSpec,
    attempts::{self, Attempt, Class},
    clone::Cloner,
    intruder::{Intruder, Relation},
    process,
    scene::Scene,
    state,
    trial::{not_tried, try_in},
};
use crate::{report::Case, setup::VerifyError};

/// User and group of the proxy, which own nothing.
const USER: &str = "1881145999";
/// Time limit for the start of a program.
const START: Duration = Duration::from_secs(30);
/// Attempts in both programs, of each class that does not need a VM.
const ATTEMPTS: [&str; 27] = [
    "file-read-secret",
    "file-create-in-public",
    "file-remove",
    "memory-read-by-proc",
    "memory-read-across",
    "ptrace-neighbour",
    "socket-path",
    "socket-abstract",
    "socket-datagram",
    "socket-udp",
    "socket-packet",
    "socket-raw",
    "socket-netlink",
    "socket-listen-at-path",
    "signal-root",
    "signal-neighbour",
    "process-fork",
    "process-program",
    "code-page-made-executable",
    "code-memory-file",
    "device-kvm",
    "group-leave",
    "privilege-setuid-program",
    "namespace-user",
    "mount-over",
    "kernel-io-uring",
    "kernel-bpf",
];
/// Connections. The proxy makes some, so a server must judge them: `super::pool` tries these in the proxy of one.
pub(super) const CONNECTIONS: [&str; 2] = ["socket-tcp", "socket-tcp-mapped"];

/// A program under test.
struct Service {
    class: Class,
    start: fn() -> io::Result<Running>,
}

const SERVICES: [Service; 2] = [
    Service {
        class: Class::Egress,
        start: egress,
    },
    Service {
        class: Class::Image,
        start: image,
    },
];

impl Service {
    /// Prefix of the names of its cases.
    fn prefix(&self) -> String {
        format!("{}-", self.class.name())
    }

    fn has(&self, attempt: &str) -> bool {
        ATTEMPTS.contains(&attempt)
            || (CONNECTIONS.contains(&attempt) && self.class == Class::Image)
    }
}

/// A process and the sockets that keep it waiting. Dropping this value ends the process.
struct Running {
    child: Child,
    _sockets: Vec<OwnedFd>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn is_case(name: &str) -> bool {
    SERVICES.iter().any(|service| {
        let case = name.strip_prefix(&service.prefix());
        name == service.class.name()
            || case.is_some_and(|case| service.has(case) || state::OF_SERVICES.contains(&case))
    })
}

/// Makes the attempts in each program, and checks its state.
pub(super) fn prove(
    spec: &ConfinementSpec,
    scene: &mut Scene,
    cloner: &Cloner,
) -> Result<Vec<Case>, VerifyError> {
    let mut cases = Vec::new();
    for service in &SERVICES {
        let prefix = service.prefix();
        let tried = attempts::all().into_iter().filter(|a| service.has(a.name));
        let class = service.class.name();
        for attempt in tried.filter(|a| spec.selects(&format!("{prefix}{}", a.name), class)) {
            scene.reset(cloner)?;
            let case = service.attempt(attempt, scene);
            cases.push(Case {
                name: format!("{prefix}{}", case.name),
                class: class.to_owned(),
                ..case
            });
        }
        let states = match (service.start)() {
            Ok(running) => state::of_service(&prefix, service.class, Ok(running.child.id())),
            Err(error) => state::of_service(&prefix, service.class, Err(error)),
        };
        let selected = |case: &Case| spec.selects(&case.name, class);
        cases.extend(states.into_iter().filter(selected));
    }
    Ok(cases)
}

impl Service {
    fn attempt(&self, attempt: &Attempt, scene: &Scene) -> Case {
        let started = (self.start)().and_then(|running| {
            scene.group.add(running.child.id())?;
            Ok(running)
        });
        match started {
            Ok(running) => {
                let seized = Intruder::enter(running.child.id(), Relation::Parent);
                try_in(attempt, scene, seized)
            }
            Err(error) => not_tried(attempt, &error.to_string()),
        }
    }
}

/// A proxy that accepts connections but has received none.
fn egress() -> io::Result<Running> {
    let (ours, theirs) = UnixStream::pair()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut command = Command::new("sh");
    // The listener is passed as standard output, and becomes descriptor 3.
    command
        .args(["-c", r#"exec "$0" "$@" 3<&1 1>/dev/null"#])
        .arg(artifacts::default_egress())
        .args(["--user", USER, "--group", USER])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(OwnedFd::from(listener)));
    let running = spawn(command, vec![ours.try_clone()?.into()])?;
    let mut start = serde_json::to_vec(&json!({"type": "start", "authority": authority()?}))?;
    start.push(b'\n');
    (&ours).write_all(&start)?;
    confined(running)
}

fn authority() -> io::Result<serde_json::Value> {
    let key = KeyPair::generate().map_err(io::Error::other)?;
    // The proxy refuses an authority that is not named after its key (`egress::control::authority_name`).
    let id = model::hex(&key.public_key_raw()[1..5]);
    let params = pki::authority(&format!("cube-egress {id}"), 1);
    let made = Authority::create(params, key).map_err(io::Error::other)?;
    Ok(json!({"certificate": made.certificate(), "key": made.key().serialize_pem()}))
}

/// A converter that waits for its first layer.
fn image() -> io::Result<Running> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    let mut command = Command::new(artifacts::default_image());
    command
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null());
    let running = spawn(command, vec![ours.try_clone()?])?;
    let limits = [
        "layers",
        "compressed",
        "stream",
        "stored",
        "ratio",
        "ratio_free",
        "zeros_free",
        "entries",
        "metadata",
        "steps",
        "apparent",
    ];
    let limits: serde_json::Map<_, _> = limits
        .map(|name| (name.to_owned(), json!(1)))
        .into_iter()
        .collect();
    let order = json!({
        "resources": {"memory": 4_u64 << 30, "cpu_seconds": 60, "deadline_seconds": 60},
        "task": {"Convert": {"limits": limits, "layers": 1, "completes": false}},
    });
    let image = open(Path::new("/dev/null"), OFlag::O_RDWR, Mode::empty())?;
    let descriptors = [image.as_raw_fd()];
    sendmsg::<()>(
        ours.as_raw_fd(),
        &[IoSlice::new(order.to_string().as_bytes())],
        &[ControlMessage::ScmRights(&descriptors)],
        MsgFlags::empty(),
        None,
    )?;
    confined(running)
}

fn spawn(mut command: Command, sockets: Vec<OwnedFd>) -> io::Result<Running> {
    let child = command.env_clear().stderr(Stdio::null()).spawn()?;
    Ok(Running {
        child,
        _sockets: sockets,
    })
}

/// Waits until the process has installed its filter, and sleeps.
fn confined(mut running: Running) -> io::Result<Running> {
    let pid = running.child.id();
    let deadline = Instant::now() + START;
    loop {
        let is_filtered = process::status(pid, "Seccomp").as_deref() == Some("2");
        if is_filtered && process::state(pid) == Some('S') {
            return Ok(running);
        }
        if let Some(status) = running.child.try_wait()? {
            return Err(io::Error::other(format!("the program ended: {status}")));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("the program has not confined itself"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_of_a_service_exists() {
        let all = attempts::all();
        for name in ATTEMPTS.iter().chain(&CONNECTIONS) {
            assert!(all.iter().any(|attempt| attempt.name == *name), "{name}");
        }
        for case in [
            "egress",
            "egress-socket-raw",
            "image-socket-tcp",
            "image-state-filter",
        ] {
            assert!(is_case(case), "{case}");
        }
        assert!(!is_case("egress-socket-tcp"), "a case of `super::pool`");
    }
}
