//! A kernel's process: its connection file, its command line, and the first exchange with it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    net::TcpListener,
    os::{
        fd::AsFd,
        unix::{fs::OpenOptionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;

use super::{
    spec::{InterruptMode, Spec},
    wire::Session,
    zmtp::{Role, Socket},
};
use crate::{clone_state::Variables, sys};

/// How long a kernel may take to answer after its start.
const PATIENCE: Duration = Duration::from_secs(110);
/// Interval in milliseconds at which the request is repeated until the kernel has answered. One request is not enough:
/// messages that the kernel publishes before it has received the subscription are lost.
const ASK: u16 = 300;
/// Interval of attempts to connect to a port that does not listen yet.
const TRY: Duration = Duration::from_millis(20);

/// A kernel that could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("the kernelspec has no command")]
    NoCommand,
    #[error("cannot start {program}")]
    Spawn {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("the kernel ended before it answered: {0}")]
    Ended(std::process::ExitStatus),
    #[error("the kernel did not answer within {PATIENCE:?}")]
    Silent,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The process, which is killed when its bridge ends.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// The environment at its start.
    pub(crate) variables: Variables,
}

/// A kernel that has answered.
pub(crate) struct Connected {
    pub(crate) process: Process,
    pub(crate) shell: Socket,
    pub(crate) orders: Socket,
    pub(crate) news: Socket,
}

/// The file with the ports and the key of a kernel; removed on drop.
struct ConnectionFile {
    path: PathBuf,
    shell: u16,
    orders: u16,
    news: u16,
}

impl Drop for ConnectionFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Starts the kernel, connects to its sockets, and waits until it has answered on shell and iopub.
pub(crate) fn start(
    spec: &Spec,
    dir: &Path,
    session: &mut Session,
) -> Result<Connected, StartError> {
    let deadline = Instant::now() + PATIENCE;
    let file = ConnectionFile::write(session)?;
    let mut process = Process::spawn(spec, dir, &file.path)?;
    let mut connect = |port, role| process.connect(port, role, deadline);
    let mut news = connect(file.news, Role::Sub)?;
    let mut shell = connect(file.shell, Role::Dealer)?;
    let orders = connect(file.orders, Role::Dealer)?;
    until_heard(&mut shell, &mut news, session, deadline)?;
    Ok(Connected {
        process,
        shell,
        orders,
        news,
    })
}

/// Sends `kernel_info_request` until the reply and a published message have arrived.
fn until_heard(
    shell: &mut Socket,
    news: &mut Socket,
    session: &mut Session,
    deadline: Instant,
) -> Result<(), StartError> {
    let mut scratch = vec![0; 4 << 10];
    let (mut replied, mut told) = (false, false);
    while !(replied && told) {
        if Instant::now() >= deadline {
            return Err(StartError::Silent);
        }
        let (_, parts) = session.request("kernel_info_request", &json!({}));
        shell.send(&parts)?;
        let asked = Instant::now();
        let pause = Duration::from_millis(ASK.into());
        while !(replied && told) && asked.elapsed() < pause {
            let mut fds =
                [shell.as_fd(), news.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            poll(&mut fds, PollTimeout::from(ASK)).map_err(io::Error::from)?;
            let [from_shell, from_news] = fds.map(|fd| fd.any() == Some(true));
            if from_shell {
                shell.receive(&mut scratch)?;
                while let Some(parts) = shell.next_message()? {
                    let message = session.read(&parts);
                    replied |= message.is_some_and(|m| m.kind == "kernel_info_reply");
                }
            }
            if from_news {
                news.receive(&mut scratch)?;
                while let Some(parts) = news.next_message()? {
                    told |= session.read(&parts).is_some();
                }
            }
        }
    }
    Ok(())
}

impl ConnectionFile {
    fn write(session: &Session) -> io::Result<Self> {
        // Ports that are currently free. The kernel binds them soon after.
        let ports = [(); 5].map(|()| TcpListener::bind("127.0.0.1:0"));
        let mut numbers = [0; 5];
        for (number, listener) in numbers.iter_mut().zip(&ports) {
            let listener = listener.as_ref().map_err(|e| io::Error::from(e.kind()))?;
            *number = listener.local_addr()?.port();
        }
        drop(ports);
        let [shell, orders, news, stdin, heartbeat] = numbers;
        let name = format!("cube-kernel-{}.json", std::process::id());
        let file = Self {
            path: std::env::temp_dir().join(name),
            shell,
            orders,
            news,
        };
        // A killed bridge with the same PID may have left its file.
        let _ = fs::remove_file(&file.path);
        let content = json!({
            "transport": "tcp", "ip": "127.0.0.1", "signature_scheme": "hmac-sha256",
            "key": session.key, "shell_port": shell, "control_port": orders, "iopub_port": news,
            "stdin_port": stdin, "hb_port": heartbeat, "kernel_name": "",
        });
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options
            .open(&file.path)?
            .write_all(content.to_string().as_bytes())?;
        Ok(file)
    }
}

impl Process {
    fn spawn(spec: &Spec, dir: &Path, connection: &Path) -> Result<Self, StartError> {
        let place = |word: &String| {
            word.replace("{connection_file}", &connection.to_string_lossy())
                .replace("{resource_dir}", &dir.to_string_lossy())
        };
        let mut words = spec.argv.iter().map(place);
        let program = words.next().ok_or(StartError::NoCommand)?;
        let mut variables: Variables = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
            .collect();
        variables.extend(spec.env.clone());
        let mut command = Command::new(&program);
        command
            .args(words)
            .envs(&spec.env)
            .stdin(Stdio::from(File::open("/dev/null")?));
        if spec.interrupt_mode == InterruptMode::Message {
            // Signals to the bridge's process group must not reach the kernel.
            command.process_group(0);
        }
        sys::end_with_parent(&mut command);
        let child = command
            .spawn()
            .map_err(|source| StartError::Spawn { program, source })?;
        Ok(Self { child, variables })
    }

    /// Connects, retrying until the kernel listens.
    fn connect(&mut self, port: u16, role: Role, deadline: Instant) -> Result<Socket, StartError> {
        loop {
            if let Ok(socket) = Socket::connect(port, role) {
                return Ok(socket);
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(StartError::Ended(status));
            }
            if Instant::now() >= deadline {
                return Err(StartError::Silent);
            }
            std::thread::sleep(TRY);
        }
    }
}
