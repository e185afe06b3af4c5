//! The targets of the attempts: files, sockets and processes around the VMM. Root owns all of them except the other
//! sandbox. After each attempt, the suite checks from outside whether they have changed.

use std::{
    fs, io,
    net::{TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{FileExt, PermissionsExt},
            net::{SocketAddr, UnixDatagram, UnixListener},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use model::ProcessStat;
use testbed::leftovers::{self, RunDir};

use super::{
    clone::{Clone, Cloner},
    group::Group,
    process::mappings,
};
use crate::setup::{VerifyError, at};

/// Directory of all scenes. Any user may traverse it.
const ROOT: &str = "/run/cube-confinement";
/// Length of the secret, in bytes.
pub(super) const SECRET: usize = 32;
/// Environment variable of the root process that contains the secret.
const VARIABLE: &str = "CUBE_CONFINEMENT_SECRET";
/// Content of the files that are not secret.
pub(super) const CONTENT: &[u8] = b"as it was";
/// Machine code that exits with status 0: `mov eax, 60; xor edi, edi; syscall`.
const CODE: [u8; 9] = [0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];
const LOAD_AT: u64 = 0x10_0000;

#[derive(Debug)]
pub(super) struct Scene {
    dir: RunDir,
    /// The secret: in a file, in the other sandbox's memory, and in the root process's environment.
    pub(super) secret: [u8; SECRET],
    pub(super) listener: UnixListener,
    pub(super) abstract_listener: UnixListener,
    pub(super) datagrams: UnixDatagram,
    pub(super) tcp: TcpListener,
    pub(super) udp: UdpSocket,
    pub(super) group: Group,
    pub(super) template: PathBuf,
    victim: Option<Victim>,
    root: Option<RootProcess>,
}

/// Another sandbox. Its guest is restored but never resumed, and its memory contains the secret.
#[derive(Debug)]
pub(super) struct Victim {
    pub(super) clone: Clone,
    /// Address of the secret in the VMM process.
    pub(super) secret_at: u64,
}

/// A process of root with the secret in its environment.
#[derive(Debug)]
pub(super) struct RootProcess {
    child: Child,
    /// Address of the secret in the process.
    pub(super) secret_at: u64,
}

impl Scene {
    /// Removes the scenes of killed runs, and creates everything except the processes.
    pub(super) fn new(template: PathBuf) -> Result<Self, VerifyError> {
        let root = Path::new(ROOT);
        leftovers::sweep(root).map_err(at(root))?;
        let dir = RunDir::create(root).map_err(at(root))?;
        Self::create(dir, template).map_err(at(root))
    }

    fn create(dir: RunDir, template: PathBuf) -> io::Result<Self> {
        for path in [Path::new(ROOT), dir.path()] {
            set_mode(path, 0o755)?;
        }
        let mut secret = [0; SECRET];
        let random: String = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let digits = random.bytes().filter(u8::is_ascii_hexdigit);
        for (to, from) in secret.iter_mut().zip(digits) {
            *to = from;
        }
        let path = |name: &str| dir.path().join(name);
        let listener = UnixListener::bind(path("listener"))?;
        let datagrams = UnixDatagram::bind(path("datagrams"))?;
        set_mode(&path("listener"), 0o777)?;
        set_mode(&path("datagrams"), 0o777)?;
        let name = SocketAddr::from_abstract_name(abstract_name())?;
        let abstract_listener = UnixListener::bind_addr(&name)?;
        let tcp = TcpListener::bind("0.0.0.0:0")?;
        let udp = UdpSocket::bind("0.0.0.0:0")?;
        for done in [
            listener.set_nonblocking(true),
            abstract_listener.set_nonblocking(true),
            datagrams.set_nonblocking(true),
            tcp.set_nonblocking(true),
            udp.set_nonblocking(true),
        ] {
            done?;
        }
        Ok(Self {
            group: Group::make()?,
            dir,
            secret,
            listener,
            abstract_listener,
            datagrams,
            tcp,
            udp,
            template,
            victim: None,
            root: None,
        })
    }

    /// Path of a file or directory of the scene.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Restores the initial state. Replaces the other sandbox if it has ended or was changed, and the root process if
    /// it has ended.
    pub(super) fn reset(&mut self, cloner: &Cloner) -> Result<(), VerifyError> {
        self.reset_files().map_err(at(Path::new(ROOT)))?;
        let secret = self.secret;
        let is_intact = |victim: &Victim| victim.clone.is_alive() && victim.holds(&secret);
        if !self.victim.as_ref().is_some_and(is_intact) {
            self.victim = None;
            self.victim = Some(Victim::make(cloner, self.dir.path(), &secret)?);
        }
        if !self.root.as_mut().is_some_and(RootProcess::is_alive) {
            self.root = None;
            self.root = Some(RootProcess::make(&secret).map_err(at(Path::new("/proc/self/exe")))?);
        }
        self.group.reset().map_err(at(Path::new("/sys/fs/cgroup")))
    }

    fn reset_files(&self) -> io::Result<()> {
        for (name, mode) in [("private", 0o700), ("public", 0o777)] {
            let path = self.path(name);
            if path.exists() {
                fs::remove_dir_all(&path)?;
            }
            fs::create_dir(&path)?;
            set_mode(&path, mode)?;
        }
        let program = smallest_program();
        for (name, mode, content) in [
            ("secret", 0o600, &self.secret[..]),
            ("writable", 0o666, CONTENT),
            ("public/doomed", 0o644, CONTENT),
            ("program", 0o755, &program),
            ("setuid", 0o4755, &program),
        ] {
            let path = self.path(name);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => fs::write(&path, content)?,
            }
            set_mode(&path, mode)?;
        }
        self.drain();
        Ok(())
    }

    /// Discards connections and datagrams of earlier attempts.
    fn drain(&self) {
        while self.listener.accept().is_ok() {}
        while self.abstract_listener.accept().is_ok() {}
        while self.tcp.accept().is_ok() {}
        while self.datagrams.recv(&mut [0; 64]).is_ok() {}
        while self.udp.recv(&mut [0; 64]).is_ok() {}
    }

    pub(super) fn victim(&self) -> io::Result<&Victim> {
        self.victim
            .as_ref()
            .ok_or_else(|| io::Error::other("the other sandbox is not running"))
    }

    pub(super) fn root(&self) -> io::Result<&RootProcess> {
        self.root
            .as_ref()
            .ok_or_else(|| io::Error::other("the root process is not running"))
    }
}

/// Abstract name of the listener.
pub(super) fn abstract_name() -> Vec<u8> {
    format!("cube-confinement-{}", std::process::id()).into_bytes()
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// A static program that exits at once, in the smallest file that Linux executes: ELF-64 with one segment (System V
/// ABI, chapters 4 and 5).
fn smallest_program() -> Vec<u8> {
    let entry = LOAD_AT + 120;
    let bytes = u64::try_from(120 + CODE.len()).unwrap_or(0);
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // ET_EXEC, EM_X86_64, version 1.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [entry, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    // No flags; sizes and counts of the headers: one program header, no section.
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    // PT_LOAD, readable and executable.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [0, LOAD_AT, LOAD_AT, bytes, bytes, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(CODE);
    file
}

impl Victim {
    fn make(cloner: &Cloner, dir: &Path, secret: &[u8; SECRET]) -> Result<Self, VerifyError> {
        let clone = cloner.start_paused(dir)?;
        let memory = PathBuf::from(format!("/proc/{}/mem", clone.pid()));
        let secret_at = end_of_largest(clone.pid()).map_err(at(&memory))?;
        let victim = Self { clone, secret_at };
        // The guest never resumes, so its data there can be overwritten.
        victim.write(secret).map_err(at(&memory))?;
        Ok(victim)
    }

    fn write(&self, secret: &[u8]) -> io::Result<()> {
        let memory = format!("/proc/{}/mem", self.clone.pid());
        let memory = fs::File::options().write(true).open(memory)?;
        memory.write_all_at(secret, self.secret_at)
    }

    /// Whether the sandbox's memory still contains the secret.
    pub(super) fn holds(&self, secret: &[u8; SECRET]) -> bool {
        let mut held = [0; SECRET];
        fs::File::open(format!("/proc/{}/mem", self.clone.pid()))
            .and_then(|memory| memory.read_exact_at(&mut held, self.secret_at))
            .is_ok_and(|()| held == *secret)
    }
}

/// Address of the last page of the guest's memory, which is by far the largest writable mapping.
fn end_of_largest(pid: u32) -> io::Result<u64> {
    let all = mappings(pid)?;
    let writable = all
        .iter()
        .filter(|mapping| mapping.rights.starts_with("rw"));
    let largest = writable.max_by_key(|mapping| mapping.len());
    let largest = largest.ok_or_else(|| io::Error::other("the VMM has no writable mapping"))?;
    Ok(largest.range.end - 4096)
}

impl RootProcess {
    fn make(secret: &[u8; SECRET]) -> io::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg("root-process")
            .env_clear()
            .env(VARIABLE, String::from_utf8_lossy(secret).as_ref())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        // The first byte of output shows that the child has started.
        let started = child
            .stdout
            .as_mut()
            .map(|out| io::Read::read(out, &mut [0; 1]));
        match started {
            Some(Ok(1)) => {}
            _ => return Err(io::Error::other("the root process wrote no output")),
        }
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
        let start = ProcessStat::parse(&stat).map(|stat| stat.env_start);
        let start = start.ok_or_else(|| io::Error::other("/proc/PID/stat has no env_start"))?;
        let name = u64::try_from(VARIABLE.len() + 1).map_err(io::Error::other)?;
        Ok(Self {
            child,
            secret_at: start + name,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Offset of the secret in /proc/PID/environ.
    pub(super) fn secret_in_environ(&self) -> u64 {
        u64::try_from(VARIABLE.len() + 1).unwrap_or(0)
    }

    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for RootProcess {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
