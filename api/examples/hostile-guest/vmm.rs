//! The control socket of the stand-in.

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
};

use model::Timeline;
use vmm_control::{
    Call, Failure, FailureKind, Reply, Request,
    files::{FileRole, Files, TemplateFile},
    frame,
};

use crate::{
    agent,
    conduct::{Conduct, State},
};

/// Bytes that [`Conduct::Inflated`] allocates.
const INFLATED: usize = 300 << 20;

#[derive(Default)]
pub(crate) struct Vmm {
    state: State,
    memory: Vec<u8>,
    /// The manifest of the restored template; snapshots of this VM get a copy.
    manifest: Vec<u8>,
}

impl Vmm {
    /// Answers the requests of one client of the control socket until the client disconnects.
    pub(crate) fn serve(&mut self, mut control: UnixStream) {
        while let Ok((call, fds)) = frame::receive::<Call>(&control) {
            let files = Files::received(&call.files, fds).unwrap();
            let answer = self.answer(call.request, files);
            let sent = match self.state.conduct {
                Conduct::MuteVmm => Ok(()),
                Conduct::HugeVmm => control.write_all(b"CVMC\x02\0\0\0\xff\xff\xff\xff"),
                _ => frame::send(&control, &answer, &[]).map_err(std::io::Error::other),
            };
            if sent.is_err() {
                return;
            }
        }
    }

    fn answer(&mut self, request: Request, mut files: Files) -> Result<Reply, Failure> {
        match request {
            Request::Restore { .. } => self.restore(&mut files),
            Request::Snapshot { .. } => {
                let paused = State {
                    resumed: true,
                    ..self.state
                };
                let state = serde_json::to_vec(&paused).map_err(failure)?;
                write(&mut files, TemplateFile::State, &state)?;
                write(&mut files, TemplateFile::Manifest, &self.manifest)
            }
            Request::SaveLayer => write(&mut files, TemplateFile::Layer, b"layer"),
            Request::Resume | Request::Pause => Ok(Reply::Done),
            Request::Shutdown => std::process::exit(0),
            other => Err(failure(format!("the stand-in does not support {other:?}"))),
        }
    }

    fn restore(&mut self, files: &mut Files) -> Result<Reply, Failure> {
        self.manifest = read(files, TemplateFile::Manifest)?;
        let state = read(files, TemplateFile::State)?;
        self.state = serde_json::from_slice(&state).map_err(failure)?;
        match self.state.conduct {
            Conduct::WordyVmm => return Err(failure(agent::forged_words())),
            Conduct::LastWords => last_words(),
            Conduct::Inflated => self.memory = vec![1; INFLATED],
            _ => {}
        }
        let listener = UnixListener::from(take(files, FileRole::Vsock)?);
        let state = self.state;
        std::thread::spawn(move || agent::serve(&listener, state));
        Ok(Reply::Started(Timeline::default()))
    }
}

fn take(files: &mut Files, role: FileRole) -> Result<OwnedFd, Failure> {
    files
        .take(role)
        .ok_or_else(|| failure(format!("no {role:?}")))
}

fn read(files: &mut Files, name: TemplateFile) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let mut file = File::from(take(files, FileRole::Template(name))?);
    file.read_to_end(&mut bytes).map_err(failure)?;
    Ok(bytes)
}

fn write(files: &mut Files, name: TemplateFile, bytes: &[u8]) -> Result<Reply, Failure> {
    let mut file = File::from(take(files, FileRole::Template(name))?);
    file.write_all(bytes).map_err(failure)?;
    Ok(Reply::Done)
}

fn last_words() -> ! {
    let line = vec![b'x'; 1 << 20];
    let mut stderr = std::io::stderr();
    for _ in 0..64 {
        stderr.write_all(&line).unwrap();
    }
    stderr.write_all(b"\x1b[2J\n").unwrap();
    std::process::exit(1)
}

fn failure(why: impl std::fmt::Display) -> Failure {
    Failure {
        kind: FailureKind::BadSpec,
        message: why.to_string(),
    }
}
