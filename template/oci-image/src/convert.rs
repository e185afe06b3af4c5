//! Converts a pulled image to a root image in the store, with a confined process for each image.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::ExitStatus,
};

use crate::{
    Pulled,
    digest::Digest,
    limits::Limits,
    program::{Program, Worker},
    provision::Userland,
    store::{Draft, Lease, Object, Reservation, Store, StoreError},
    worker::{Order, Part, Reply, Task, confine::Resources, send},
};

/// Part of each image's key. Raise it when the same layers result in a different image.
const CONVERTER: &str = "oci-image 2";
/// Maximum number of bytes that a worker writes between two measurements. Reserved ahead.
const AHEAD: u64 = 64 << 20;

/// Converts images. Each conversion runs in a separate process, which can only access the files of its image.
#[derive(Debug)]
pub struct Converter {
    program: Program,
    limits: Limits,
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
    /// The reason why the image was rejected, as reported by the worker.
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
    #[error("converter sent an invalid reply")]
    Reply(#[source] io::Error),
    #[error("cannot start the converter {}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("cannot use a draft of the store")]
    Draft(#[source] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Converter {
    /// `program` is `cube-image`. Without [`Converter::with_userland`], root images contain the layers and nothing
    /// else.
    #[must_use]
    pub fn new(program: &Path, limits: Limits, resources: Resources) -> Self {
        Self {
            program: Program::new(program, resources),
            limits,
            userland: None,
        }
    }

    /// Puts the converter processes into a cgroup, like [`Program::in_group`].
    #[must_use]
    pub fn in_group(mut self, procs: Option<PathBuf>) -> Self {
        self.program = self.program.in_group(procs);
        self
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

    /// Makes the root image of a pulled image, unless the store already has it. Blocks: call it on a thread for
    /// blocking work.
    ///
    /// # Errors
    /// Returns an error if a layer is malformed or hostile, a limit is exceeded, or the store fails. No files are left
    /// then.
    pub fn convert(&self, pulled: &Pulled, store: &Store) -> Result<Lease, ConvertError> {
        self.convert_unless(pulled, store, &|| false)
    }

    /// Like [`Converter::convert`], but ends soon after `is_cancelled` returns true.
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
        // The last file is the image. The others are unpacked layers.
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
        let mut worker = self.program.start()?;
        if let Err(error) = self.order(pulled, files, &worker) {
            return Err(worker.end().unwrap_or(error));
        }
        let replied = worker.reply(is_cancelled, || {
            let written: io::Result<u64> = files
                .iter()
                .map(|draft| Ok(draft.file().metadata()?.blocks() * 512))
                .sum();
            room.grow_to(written.map_err(ConvertError::Draft)? + AHEAD)?;
            Ok(())
        });
        match replied? {
            Reply::Done => Ok(()),
            _ => Err(ConvertError::Reply(io::ErrorKind::InvalidData.into())),
        }
    }

    fn order(&self, pulled: &Pulled, files: &[Draft], worker: &Worker) -> Result<(), ConvertError> {
        let order = Order {
            resources: self.program.resources.clone(),
            task: Task::Convert {
                limits: self.limits.clone(),
                layers: pulled.layers.len(),
                completes: self.userland.is_some(),
            },
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
