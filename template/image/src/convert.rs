//! From a pulled image to a root image in the store, by a confined process for each image.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::MetadataExt, process::ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use nix::{
    libc,
    poll::{PollFd, PollFlags, poll},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, setpriority_process},
};

use crate::{
    Pulled,
    digest::Digest,
    limits::Limits,
    provision::Userland,
    store::{Draft, Lease, Object, Reservation, Store, StoreError},
    worker::{Order, Part, Reply, confine::Resources, receive, send},
};

/// Part of every image's key. Raise it when the same layers give another image.
const CONVERTER: &str = "oci-image 2";
/// The lowest priority, as of nice(1). A process of the normal one gets 68 times as much CPU time.
const NICE: i32 = 19;
/// How often the worker's files are measured, in milliseconds.
const MEASURE_MS: u16 = 50;
/// How much a worker may write between two measurements, in bytes. Reserved ahead.
const AHEAD: u64 = 64 << 20;

/// Converts images. Each conversion runs in a process of its own, which sees only the files of its image.
#[derive(Debug)]
pub struct Converter {
    program: PathBuf,
    limits: Limits,
    resources: Resources,
    userland: Option<Programs>,
}

/// The files of a userland.
#[derive(Debug)]
struct Programs {
    bash: File,
    busybox: File,
    digest: Digest,
}

#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The image's fault, in words of the worker.
    #[error("{0}")]
    Refused(String),
    #[error("image takes longer than {0} s to convert: use a smaller image")]
    Deadline(u64),
    #[error("image needs more than {0} s of CPU time to convert: use a smaller image")]
    Cpu(u64),
    #[error("image needs more than {} MiB of memory to convert: use an image with fewer files", .0 >> 20)]
    Memory(u64),
    #[error(
        "converter of the image was killed, probably for lack of memory: use an image with fewer files, or give the server more memory"
    )]
    Killed,
    #[error("conversion of the image was cancelled")]
    Cancelled,
    #[error("converter of the image ended unexpectedly: {0}")]
    Ended(ExitStatus),
    #[error("converter has sent an invalid reply")]
    Reply(#[source] io::Error),
    #[error("cannot start the converter {}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("cannot use a draft of the store")]
    Draft(#[source] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Converter {
    /// `program` is `cube-image`. Without [`Converter::with_userland`], root images have what the layers have, and
    /// nothing more.
    #[must_use]
    pub fn new(program: &Path, limits: Limits, resources: Resources) -> Self {
        Self {
            program: program.to_owned(),
            limits,
            resources,
            userland: None,
        }
    }

    /// Completes images for sandboxes, with the static programs `bash` and `busybox` in a directory.
    ///
    /// # Errors
    /// Returns an error if one of them cannot be read.
    pub fn with_userland(mut self, dir: &Path) -> io::Result<Self> {
        let bash = File::open(dir.join("bash"))?;
        let busybox = File::open(dir.join("busybox"))?;
        let digest = Userland::of_files(&bash, &busybox)?.digest();
        self.userland = Some(Programs {
            bash,
            busybox,
            digest,
        });
        Ok(self)
    }

    /// The key of an image's root image in the store.
    #[must_use]
    pub fn key(&self, manifest: &Digest) -> Digest {
        let additions = self.userland.as_ref().map(|userland| userland.digest);
        Digest::of(format!("{CONVERTER}\n{manifest}\n{additions:?}\n").as_bytes())
    }

    /// Makes the root image of a pulled image, unless the store has it. Blocks: call it on a thread for blocking work.
    ///
    /// # Errors
    /// Returns an error if a layer is malformed or hostile, a limit is exceeded, or the store fails. Nothing is left.
    pub fn convert(&self, pulled: &Pulled, store: &Store) -> Result<Lease, ConvertError> {
        self.convert_unless(pulled, store, &|| false)
    }

    /// As [`Converter::convert`], but ends soon after `is_cancelled` returns true.
    ///
    /// # Errors
    /// Returns [`ConvertError::Cancelled`], and the errors of [`Converter::convert`].
    pub fn convert_unless(
        &self,
        pulled: &Pulled,
        store: &Store,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Lease, ConvertError> {
        let key = self.key(&pulled.digest);
        if let Some(image) = store.take(Object::Image(key)) {
            return Ok(image);
        }
        let mut files = Vec::new();
        for _ in 0..=pulled.layers.len() {
            files.push(store.draft(0)?);
        }
        let mut room = store.reserve(AHEAD)?;
        self.run(pulled, &files, &mut room, is_cancelled)?;
        // The last one is the image; the others are unpacked layers.
        let image = files.pop().map(|image| image.finish_image(key));
        Ok(image.unwrap_or_else(|| unreachable!("there is one more file than layers"))?)
    }

    fn run(
        &self,
        pulled: &Pulled,
        files: &[Draft],
        room: &mut Reservation,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), ConvertError> {
        let mut worker = Worker::start(&self.program)?;
        if let Err(error) = self.order(pulled, files, &worker) {
            return Err(match worker.end(&self.resources) {
                Some(ended) => ended,
                None => error,
            });
        }
        let deadline = Duration::from_secs(self.resources.deadline_seconds);
        let begin = Instant::now();
        loop {
            let has_ended = worker.has_message();
            let written: io::Result<u64> = files
                .iter()
                .map(|draft| Ok(draft.file().metadata()?.blocks() * 512))
                .sum();
            room.grow_to(written.map_err(ConvertError::Draft)? + AHEAD)?;
            if has_ended {
                break;
            }
            if is_cancelled() {
                return Err(ConvertError::Cancelled);
            }
            if begin.elapsed() > deadline {
                return Err(ConvertError::Deadline(deadline.as_secs()));
            }
        }
        match receive(worker.socket.as_fd()) {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((Reply::Refused(text), _)) => Err(ConvertError::Refused(printable(&text))),
            Err(error) => Err(worker
                .end(&self.resources)
                .unwrap_or(ConvertError::Reply(error))),
        }
    }

    fn order(&self, pulled: &Pulled, files: &[Draft], worker: &Worker) -> Result<(), ConvertError> {
        let order = Order {
            limits: self.limits.clone(),
            resources: self.resources.clone(),
            layers: pulled.layers.len(),
            completes: self.userland.is_some(),
        };
        let image = files.last().map(|draft| draft.file().as_fd());
        let mut descriptors = Vec::from_iter(image);
        if let Some(userland) = &self.userland {
            descriptors.extend([userland.bash.as_fd(), userland.busybox.as_fd()]);
        }
        let socket = worker.socket.as_fd();
        send(socket, &order, &descriptors).map_err(ConvertError::Reply)?;
        for (layer, draft) in pulled.layers.iter().zip(files) {
            let blob = layer.blob.open()?;
            let part = Part {
                compression: layer.compression,
                diff_id: layer.diff_id,
            };
            let descriptors = [blob.as_fd(), draft.file().as_fd()];
            send(socket, &part, &descriptors).map_err(ConvertError::Reply)?;
        }
        Ok(())
    }
}

/// Text of a process that may be taken over.
fn printable(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(2000).map(plain).collect()
}

/// A process for one image. Dropping it kills and reaps it.
struct Worker {
    child: Child,
    socket: OwnedFd,
}

impl Worker {
    fn start(program: &Path) -> Result<Self, ConvertError> {
        let failed = |source| ConvertError::Start {
            program: program.to_owned(),
            source,
        };
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (socket, theirs) = pair.map_err(io::Error::from).map_err(failed)?;
        let child = Command::new(program)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.map_err(failed)?;
        let worker = Self { child, socket };
        // Sandboxes go first. The kernel derives the lowest priority of reads and writes from this.
        if let Some(pid) = Pid::from_raw(worker.child.id().cast_signed()) {
            let lowered = setpriority_process(Some(pid), NICE);
            lowered.map_err(io::Error::from).map_err(failed)?;
        }
        // If memory runs short, the kernel ends the worker and not the server, whose cgroup it is in.
        let adjustment = format!("/proc/{}/oom_score_adj", worker.child.id());
        fs::write(adjustment, "1000").map_err(failed)?;
        Ok(worker)
    }

    /// Waits for a message or the end of the process, but not longer than [`MEASURE_MS`].
    fn has_message(&self) -> bool {
        let mut sources = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        // A signal handler of the server may interrupt the call.
        poll(&mut sources, MEASURE_MS).is_ok_and(|ready| ready > 0)
    }

    /// How the process ended, if it did so with an error. Kills it if it still runs.
    fn end(&mut self, resources: &Resources) -> Option<ConvertError> {
        // The socket of a process closes shortly before the process can be waited for.
        let begin = Instant::now();
        while self.child.try_wait().ok()?.is_none() && begin.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Harmless after its end.
        let _ = self.child.kill();
        let status = self.child.wait().ok()?;
        match status.signal() {
            None if status.success() => None,
            Some(libc::SIGXCPU) => Some(ConvertError::Cpu(resources.cpu_seconds)),
            Some(libc::SIGKILL) => Some(ConvertError::Killed),
            // Rust aborts when an allocation fails. A panic sends a reply first.
            Some(libc::SIGABRT) => Some(ConvertError::Memory(resources.memory)),
            _ => Some(ConvertError::Ended(status)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Harmless after its end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_the_lowest_priority_and_is_killed_first() {
        // It waits for its standard input, as the converter does.
        let worker = Worker::start(Path::new("/bin/cat")).unwrap();
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", worker.child.id()));
        let stat = read("stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        // proc(5): the 19th field; the text begins with the third.
        assert_eq!(fields.split(' ').nth(16), Some("19"), "{stat}");
        assert_eq!(read("oom_score_adj").unwrap().trim(), "1000");
    }
}
