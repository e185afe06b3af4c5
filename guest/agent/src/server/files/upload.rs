//! `POST /files`: receiving one file as raw bytes, or several in a form, either optionally compressed.
//!
//! A file is opened, given to the user and truncated when it begins, written as its bytes arrive, and given its
//! metadata at its end. If a request fails, everything written so far stays.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};

use envd::WriteInfo;
use flate2::write::MultiGzDecoder;

use transport::{Refusal, Sink, http};

use super::{
    super::core::{Conn, Core},
    failure::FileError,
    media_type::MediaType,
    metadata::{self, Metadata},
    multipart::{Event, Multipart, MultipartError, PartHead},
    owner::{gives_away, make_dirs},
    path::resolve,
};
use crate::users::User;

/// Largest number of files in a form.
const MAX_FILES: usize = 16 << 10;

/// The parameters of an upload.
pub(crate) struct Plan {
    /// The `path` of the query. If it is `None`, the file names in a form are used as paths.
    pub(super) path: Option<String>,
    pub(super) workdir: String,
    pub(super) user: User,
    pub(super) metadata: Metadata,
    pub(super) content_type: String,
    /// The content coding of the whole body.
    pub(super) encoding: String,
}

/// An upload in progress.
pub(crate) enum Upload {
    Plain(Box<Content>),
    Gzip(Box<MultiGzDecoder<Content>>),
}

/// The destination of decoded bytes.
pub(crate) struct Content {
    plan: Plan,
    form: Form,
    /// The file being written.
    open: Option<OpenFile>,
    written: Vec<WriteInfo>,
    paths: BTreeSet<PathBuf>,
}

/// The format of the decoded bytes.
enum Form {
    Raw(PathBuf),
    Multipart(Box<Multipart>),
}

struct OpenFile {
    file: File,
    path: PathBuf,
}

impl Upload {
    pub(super) fn open(plan: Plan) -> Result<Self, FileError> {
        let gzip = match plan.encoding.as_str() {
            "" => false,
            encoding if encoding.eq_ignore_ascii_case("gzip") => true,
            encoding => {
                let message = format!("unsupported Content-Encoding: {encoding}, supported: gzip");
                return Err(FileError::new(400, message));
            }
        };
        let mut content = Content::new(plan)?;
        if gzip {
            // The file is opened with the first decoded bytes, so a body that is not gzip truncates nothing.
            return Ok(Self::Gzip(Box::new(MultiGzDecoder::new(content))));
        }
        if let Form::Raw(path) = &content.form {
            content.open = Some(OpenFile::open(path, &content.plan.user)?);
        }
        Ok(Self::Plain(Box::new(content)))
    }

    fn finish(self) -> Result<Vec<WriteInfo>, FileError> {
        match self {
            Self::Plain(content) => content.finish(),
            Self::Gzip(decoder) => decoder.finish().map_err(decoding_failed)?.finish(),
        }
    }
}

impl Sink<Core> for Upload {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let written = match self {
            Self::Plain(content) => content.take(bytes),
            Self::Gzip(decoder) => decoder.write_all(bytes).map_err(decoding_failed),
        };
        written.map_err(Refusal::from)
    }

    /// Answers with the list of written files.
    fn finish(self: Box<Self>, _: &mut Core, conn: &mut Conn) {
        match Self::finish(*self) {
            Ok(written) => {
                let written = serde_json::to_vec(&written).unwrap_or_default();
                conn.answer(200, http::JSON, &written);
            }
            Err(error) => conn.error(error.status, &error.message),
        }
    }
}

/// Converts a failed decompression to the response: the destination's own error if it has failed, otherwise a 400.
fn decoding_failed(error: io::Error) -> FileError {
    let message = format!("error decompressing request body: {error}");
    let inner = error.into_inner();
    let inner = inner.and_then(|error| error.downcast::<FileError>().ok());
    inner.map_or_else(|| FileError::new(400, message), |error| *error)
}

impl Content {
    fn new(plan: Plan) -> Result<Self, FileError> {
        let kind = MediaType::parse(&plan.content_type);
        let form = match kind.value.as_str() {
            value if value.starts_with("multipart/") => {
                let boundary = kind.parameter("boundary").unwrap_or_default();
                let reader = Multipart::new(&boundary);
                Form::Multipart(Box::new(reader.map_err(|e| bad_form(&e))?))
            }
            // A body without a content type is taken as raw bytes.
            "" | "application/octet-stream" => match &plan.path {
                Some(path) => Form::Raw(resolve(path, &plan.workdir, &plan.user.home)?),
                None => {
                    let message = "path query parameter is required for raw body upload";
                    return Err(FileError::new(400, message));
                }
            },
            other => {
                let message = format!(
                    "unsupported content type: {other}, expected multipart/form-data or \
                     application/octet-stream"
                );
                return Err(FileError::new(400, message));
            }
        };
        Ok(Self {
            plan,
            form,
            open: None,
            written: Vec::new(),
            paths: BTreeSet::new(),
        })
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let mut input = bytes;
        loop {
            let event = match &mut self.form {
                Form::Raw(path) => {
                    if self.open.is_none() {
                        self.open = Some(OpenFile::open(path, &self.plan.user)?);
                    }
                    return write(&mut self.open, input);
                }
                Form::Multipart(reader) => reader.step(&mut input).map_err(|e| bad_form(&e))?,
            };
            let begun = match event {
                Event::More => return Ok(()),
                Event::Data(data) => {
                    write(&mut self.open, data)?;
                    continue;
                }
                Event::Part(head) => Some(head),
                Event::PartEnd => None,
            };
            match begun {
                Some(head) => self.begin_part(&head)?,
                None => self.end_file()?,
            }
        }
    }

    /// Opens the file of a part. Fields other than `file` are skipped.
    fn begin_part(&mut self, head: &PartHead) -> Result<(), FileError> {
        if head.name.as_deref() != Some("file") {
            return Ok(());
        }
        if self.written.len() == MAX_FILES {
            let message = format!("more than {MAX_FILES} files in one request");
            return Err(FileError::new(400, message));
        }
        let named = self.plan.path.as_ref().or(head.filename.as_ref());
        let named = named.ok_or_else(|| {
            FileError::new(
                400,
                "a file has neither a filename nor a path to be written to",
            )
        })?;
        let path = resolve(named, &self.plan.workdir, &self.plan.user.home)?;
        if !self.paths.insert(path.clone()) {
            let message = format!(
                "you cannot upload multiple files to the same path '{}' in one upload request, only \
                 the first specified file was uploaded",
                path.display()
            );
            return Err(FileError::new(400, message));
        }
        self.open = Some(OpenFile::open(&path, &self.plan.user)?);
        Ok(())
    }

    fn end_file(&mut self) -> Result<(), FileError> {
        if let Some(open) = self.open.take() {
            self.written.push(open.finish(&self.plan.metadata)?);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<WriteInfo>, FileError> {
        match &self.form {
            // If a compressed body was empty, the file is not open yet.
            Form::Raw(_) => self.take(&[])?,
            Form::Multipart(reader) => reader.finish().map_err(|e| bad_form(&e))?,
        }
        self.end_file()?;
        Ok(self.written)
    }
}

impl Write for Content {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.take(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn bad_form(error: &MultipartError) -> FileError {
    FileError::new(400, format!("error reading form: {error}"))
}

fn write(open: &mut Option<OpenFile>, bytes: &[u8]) -> Result<(), FileError> {
    let Some(OpenFile { file, path }) = open else {
        return Ok(());
    };
    file.write_all(bytes)
        .map_err(|error| FileError::of(path, &error))
}

impl OpenFile {
    /// Opens a file and truncates it, after creating it and its missing parents if necessary. Gives the file and the
    /// new parents to the user.
    fn open(path: &Path, user: &User) -> Result<Self, FileError> {
        let failed = |error| FileError::of(path, &error);
        if let Some(parent) = path.parent() {
            make_dirs(parent, user).map_err(failed)?;
        }
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o666)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path);
        let file = opened.map_err(|error| match error.raw_os_error() {
            // A FIFO without a reader.
            Some(libc::ENXIO) => failed(io::ErrorKind::InvalidInput.into()),
            _ => failed(error),
        })?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        if gives_away(user) {
            let (uid, gid) = (user.credentials.uid, user.credentials.gid);
            fchown(&file, Some(uid), Some(gid)).map_err(failed)?;
        }
        // Truncating an empty file would send watchers a needless event.
        if metadata.len() > 0 {
            file.set_len(0).map_err(failed)?;
        }
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    fn finish(self, metadata: &Metadata) -> Result<WriteInfo, FileError> {
        metadata::replace(&self.file, metadata)
            .map_err(|error| FileError::of(&self.path, &error))?;
        let name = self.path.file_name().unwrap_or_default();
        Ok(WriteInfo {
            name: name.to_string_lossy().into_owned(),
            path: self.path.to_string_lossy().into_owned(),
            kind: "file".into(),
            metadata: metadata::read(&self.path),
        })
    }
}
