//! `GET /files`: sending a file.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use envd::ErrorBody;
use flate2::{Compression, write::GzEncoder};

use transport::{Exchange, Gone, Key, Rest, Step, http};

use super::{
    super::core::{Conn, Core},
    failure::FileError,
    head::FileHead,
    media_type,
    range::{self, Coding, Wanted},
};

/// No more of the file is read while a connection has at least this many unsent bytes.
const HIGH_WATER: usize = 64 << 10;

/// A file that is being sent.
pub(crate) struct Download {
    file: File,
    /// Bytes still to be read; `None` for a file of unknown size, which is read to its end.
    left: Option<u64>,
    /// The compressor of a compressed response. Its output is moved to the connection at once.
    gzip: Option<Box<GzEncoder<Vec<u8>>>>,
    /// The response is chunked, because its length is not known in advance.
    chunked: bool,
}

/// The beginning of a response.
pub(crate) enum Opened {
    /// The file, and the head of the response.
    Found {
        download: Download,
        status: u16,
        /// Header lines, each ended by CRLF.
        lines: String,
    },
    /// The requested range is empty or beyond the end of the file, which has `size` bytes.
    Unsatisfiable { size: u64 },
}

impl Download {
    pub(super) fn open(path: &Path, asked: &FileHead) -> Result<Opened, FileError> {
        let failed = |error| FileError::of(path, &error);
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let mut file = opened.map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        if !metadata.is_file() {
            let message = format!("path '{}' is not a regular file", path.display());
            return Err(FileError::new(400, message));
        }
        let coding = range::coding(&asked.accept_encoding);
        let coding = coding.ok_or_else(|| {
            FileError::new(406, "no acceptable encoding, offered are gzip and identity")
        })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut lines = format!(
            "accept-ranges: bytes\r\nvary: accept-encoding\r\ncontent-disposition: {}\r\n",
            media_type::content_disposition(&name)
        );
        let size = metadata.len();
        let range = asked.range.as_deref().filter(|_| !asked.if_range);
        // Files of /proc and /sys report size zero but have content.
        let (mut left, mut gzip, mut status) = (Some(size).filter(|size| *size > 0), None, 200);
        match range::wanted(range, size) {
            Wanted::Unsatisfiable if size > 0 => return Ok(Opened::Unsatisfiable { size }),
            Wanted::Part { start, len } => {
                file.seek(SeekFrom::Start(start)).map_err(failed)?;
                let last = start + len - 1;
                lines.push_str(&format!("content-range: bytes {start}-{last}/{size}\r\n"));
                (left, status) = (Some(len), 206);
            }
            Wanted::Whole | Wanted::Unsatisfiable if coding == Coding::Gzip => {
                lines.push_str("content-encoding: gzip\r\n");
                gzip = Some(Box::new(GzEncoder::new(Vec::new(), Compression::fast())));
            }
            Wanted::Whole | Wanted::Unsatisfiable => {}
        }
        let download = Self {
            chunked: left.is_none() || gzip.is_some(),
            file,
            left,
            gzip,
        };
        Ok(Opened::Found {
            download,
            status,
            lines,
        })
    }

    /// Reads the next bytes into `scratch`. Returns their number, which is zero at the end. After an error the caller
    /// must close the connection, because the head has already been sent.
    fn read(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        let most = self.left.map_or(usize::MAX, |left| {
            usize::try_from(left).unwrap_or(usize::MAX)
        });
        let len = scratch.len().min(most);
        let n = match self.file.read(scratch.get_mut(..len).unwrap_or_default()) {
            // Some files of /proc return EAGAIN at their end.
            Err(error) if self.left.is_none() && error.kind() == io::ErrorKind::WouldBlock => 0,
            result => result?,
        };
        if let Some(left) = &mut self.left {
            if n == 0 && *left > 0 {
                // The file was truncated in the meantime.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            *left -= u64::try_from(n).unwrap_or(*left);
        }
        Ok(n)
    }
}

/// Queues the head of the response and begins to send the file. Answers 416 if the range cannot be satisfied.
pub(crate) fn begin(conn: &mut Conn, opened: Opened) {
    const RAW: &str = "application/octet-stream";
    let (download, status, lines) = match opened {
        Opened::Found {
            download,
            status,
            lines,
        } => (download, status, lines),
        Opened::Unsatisfiable { size } => return refuse_range(conn, size),
    };
    let length = download.left.filter(|_| !download.chunked);
    http::push_head_with(&mut conn.out, status, RAW, &lines, length, conn.after);
    conn.begin(download);
}

fn refuse_range(conn: &mut Conn, size: u64) {
    let error = ErrorBody {
        code: 416,
        message: format!("the file has {size} bytes"),
    };
    let body = serde_json::to_vec(&error).unwrap_or_default();
    let lines = format!("content-range: bytes */{size}\r\n");
    let length = u64::try_from(body.len()).ok();
    http::push_head_with(&mut conn.out, 416, http::JSON, &lines, length, conn.after);
    conn.out.extend_from_slice(&body);
    conn.end_request(Rest::Read);
}

impl Exchange<Core> for Download {
    /// Sends the next piece.
    fn step(&mut self, core: &mut Core, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        if conn.backlog() >= HIGH_WATER {
            return Ok(Step::Wait);
        }
        let len = self.read(&mut core.io.scratch).map_err(|_| Gone)?;
        let over = self.left.map_or(len == 0, |left| left == 0);
        let bytes = core.io.scratch.get(..len).unwrap_or_default();
        match &mut self.gzip {
            Some(gzip) => {
                gzip.write_all(bytes).map_err(|_| Gone)?;
                if over {
                    gzip.try_finish().map_err(|_| Gone)?;
                }
                push(&mut conn.out, gzip.get_ref(), self.chunked);
                gzip.get_mut().clear();
            }
            None => push(&mut conn.out, bytes, self.chunked),
        }
        if over {
            if self.chunked {
                conn.out.extend_from_slice(http::LAST_CHUNK);
            }
            conn.end_request(Rest::Read);
        }
        Ok(Step::Again)
    }
}

fn push(out: &mut Vec<u8>, bytes: &[u8], chunked: bool) {
    if chunked {
        http::push_chunk(out, bytes);
    } else {
        out.extend_from_slice(bytes);
    }
}
