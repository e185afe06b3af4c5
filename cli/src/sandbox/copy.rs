//! `cube sandbox cp`: files and directories, both ways.
//!
//! Lists from a sandbox are not trusted: a name that is not a single path component is rejected, links are never
//! created on this host, and no file is written through a link.

mod plan;

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use client::endpoint::Wire;
use envd::{
    ClientError, EntryInfo, EntryResponse, EnvdClient, ExecRequest, FileType, ListDirRequest,
    ListDirResponse, PathRequest,
};
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    attach::{Draft, Lease},
    context::Context,
    failure::{Failure, Peer},
    progress::transfer,
    server::SandboxRoute,
};
use plan::{Place, component};

/// Timeout of one file.
const PER_FILE: Duration = Duration::from_secs(6 * 3600);
/// Limits for the tree of a sandbox.
const MAX_ENTRIES: u64 = 1_000_000;
const MAX_DEPTH: usize = 200;
/// Maximum number of files whose modes one command sets.
const MODES_AT_ONCE: usize = 200;
const EXECUTABLE: u32 = 0o111;

#[derive(Args, Debug)]
pub(crate) struct CopyArgs {
    /// A local path, or ID:PATH in a sandbox
    #[arg(value_name = "FROM")]
    from: String,
    /// The other path; a copy to an existing directory is placed inside it
    #[arg(value_name = "TO")]
    to: String,
    /// User in the sandbox, who owns the files written there [default: the template's]
    #[arg(short, long, value_name = "NAME")]
    user: Option<String>,
}

/// A copy in progress.
struct Copier {
    _lease: Lease,
    draft: Draft,
    client: EnvdClient<Wire>,
    route: SandboxRoute,
    user: Option<String>,
    transfer: ProgressBar,
    files: u64,
    entries: u64,
    /// Paths in the sandbox that have to become executable.
    executables: Vec<String>,
}

pub(super) fn copy(context: &Context, args: &CopyArgs) -> Result<(), Failure> {
    let draft = Draft::guarded();
    let (from, to) = (Place::parse(&args.from), Place::parse(&args.to));
    let mut server = context.server()?;
    let mut copier = |id: &str| -> Result<Copier, Failure> {
        let route = server.find(id)?;
        let mut client = server.agent(&route)?;
        client.set_timeout(PER_FILE);
        Ok(Copier {
            _lease: Lease::keep(server.another(), route.id.clone()),
            draft: draft.clone(),
            client,
            route,
            user: args.user.clone(),
            transfer: transfer(&args.from),
            files: 0,
            entries: 0,
            executables: Vec::new(),
        })
    };
    let copier = match (from, to) {
        (Place::Here(from), Place::Sandbox(id, to)) => {
            // Checked first, so that a mistyped path needs no server.
            let found = fs::metadata(&from).map_err(|why| here(&from, &why))?;
            let mut copier = copier(&id)?;
            let to = copier.target_there(&to, &from)?;
            if found.is_dir() {
                copier.put_dir(&from, &to, 0)?;
            } else {
                copier.put_file(&from, &to)?;
            }
            copier.set_modes()?;
            copier
        }
        (Place::Sandbox(id, from), Place::Here(to)) => {
            let mut copier = copier(&id)?;
            let entry = copier.stat(&from)?.ok_or_else(|| {
                Failure::refused(format!("{from} does not exist in sandbox {id}"))
            })?;
            let to = target_here(&to, &entry)?;
            match entry.kind {
                FileType::Directory => copier.get_dir(&from, &to, 0)?,
                FileType::File | FileType::Symlink | FileType::Unspecified => {
                    copier.get_file(&from, &to, entry.mode, entry.size)?;
                }
            }
            copier
        }
        (Place::Here(_), Place::Here(_)) => {
            return Err(Failure::usage("neither place is in a sandbox")
                .with_cure("write ID:PATH for a path in a sandbox"));
        }
        (Place::Sandbox(..), Place::Sandbox(..)) => {
            return Err(Failure::usage("both places are in sandboxes")
                .with_cure("copy to this host first, and from here to the other sandbox"));
        }
    };
    copier.finish(context)
}

fn here(path: &Path, why: &io::Error) -> Failure {
    Failure::refused(format!("{}: {why}", path.display()))
}

/// A local file that cannot be read or written during the copy.
fn here_not(verb: &str, path: &Path, why: &io::Error) -> Failure {
    let failure = Failure::refused(format!("cannot {verb} {}: {why}", path.display()));
    match why.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            failure.with_cure("free some space there, or copy to another directory")
        }
        io::ErrorKind::FileTooLarge => failure.with_cure(
            "its file system or `ulimit -f` allows no larger files: copy to another directory",
        ),
        io::ErrorKind::UnexpectedEof => {
            failure.with_cure("it became shorter while it was read: copy it again")
        }
        _ => failure,
    }
}

/// Local destination of a copy: inside an existing directory, under the name of the source.
fn target_here(to: &Path, entry: &EntryInfo) -> Result<PathBuf, Failure> {
    if !to.is_dir() {
        return Ok(to.to_owned());
    }
    if entry.name == "/" || entry.name.is_empty() {
        return Ok(to.to_owned());
    }
    Ok(to.join(component(&entry.name)?))
}

impl Copier {
    fn failed(&self, path: &str, why: &ClientError) -> Failure {
        let id = &self.route.id;
        match why {
            ClientError::Refused { message, .. } => {
                Failure::refused(format!("{path} in sandbox {id}: {message}"))
            }
            ClientError::NotReachable { .. }
            | ClientError::Local { .. }
            | ClientError::Timeout(_)
            | ClientError::Protocol(_) => Failure::of_call(why, &Peer::Sandbox(id)),
        }
    }

    /// A failed transfer. `verb` is the action on the local file `local`.
    fn not_copied(&self, verb: &str, local: &Path, path: &str, why: &ClientError) -> Failure {
        match why {
            ClientError::Local { source, .. } => here_not(verb, local, source),
            ClientError::NotReachable { .. }
            | ClientError::Refused { .. }
            | ClientError::Timeout(_)
            | ClientError::Protocol(_) => self.failed(path, why),
        }
    }

    fn call<A: serde::de::DeserializeOwned>(
        &mut self,
        method: &str,
        path: &str,
        message: &impl serde::Serialize,
    ) -> Result<Option<A>, Failure> {
        let user = self.user.clone();
        let answer = match &user {
            None => self.client.call(method, message),
            Some(user) => self.client.call_as(user, method, message),
        };
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(ClientError::Refused { status: 404, .. }) => Ok(None),
            Err(why) => Err(self.failed(path, &why)),
        }
    }

    /// The entry at a path in the sandbox. `None`: there is none.
    fn stat(&mut self, path: &str) -> Result<Option<EntryInfo>, Failure> {
        let request = PathRequest {
            path: path.to_owned(),
        };
        let answer = self.call::<EntryResponse>("filesystem.Filesystem/Stat", path, &request)?;
        Ok(answer.and_then(|answer| answer.entry))
    }

    /// Destination of a copy in the sandbox: inside an existing directory, under the name of the source.
    fn target_there(&mut self, to: &str, from: &Path) -> Result<String, Failure> {
        let name = fs::canonicalize(from).map_err(|why| here(from, &why))?;
        let name = name
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let found = self.stat(to)?;
        let is_dir = found.is_some_and(|entry| entry.kind == FileType::Directory);
        if is_dir || to.is_empty() || to.ends_with('/') {
            return Ok(join(to, &name));
        }
        Ok(to.to_owned())
    }

    fn put_dir(&mut self, from: &Path, to: &str, depth: usize) -> Result<(), Failure> {
        check_depth(to, depth)?;
        let request = PathRequest {
            path: to.to_owned(),
        };
        if self.stat(to)?.is_none() {
            self.call::<EntryResponse>("filesystem.Filesystem/MakeDir", to, &request)?;
        }
        let mut entries = fs::read_dir(from)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|why| here(from, &why))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
                return Err(Failure::refused(format!(
                    "{}: the name is not UTF-8",
                    path.display()
                )));
            };
            let inside = join(to, &name);
            let kind = entry.file_type().map_err(|why| here(&path, &why))?;
            match fs::metadata(&path) {
                Ok(found) if found.is_file() => self.put_file(&path, &inside)?,
                Ok(found) if found.is_dir() && !kind.is_symlink() => {
                    self.put_dir(&path, &inside, depth + 1)?;
                }
                _ => skip(&path.display().to_string()),
            }
        }
        Ok(())
    }

    fn put_file(&mut self, from: &Path, to: &str) -> Result<(), Failure> {
        let file = File::open(from).map_err(|why| here(from, &why))?;
        let found = file.metadata().map_err(|why| here(from, &why))?;
        if !found.is_file() {
            // Its length is unknown before it is read.
            return Err(Failure::refused(format!(
                "{} is not a file",
                from.display()
            )));
        }
        let user = self.user.clone();
        self.transfer.inc_length(found.len());
        let mut counted = self.transfer.wrap_read(file);
        let sent = self
            .client
            .upload(to, &mut counted, found.len(), user.as_deref());
        sent.map_err(|why| self.not_copied("read", from, to, &why))?;
        self.files += 1;
        if found.permissions().mode() & EXECUTABLE != 0 {
            self.executables.push(to.to_owned());
            if self.executables.len() >= MODES_AT_ONCE {
                self.set_modes()?;
            }
        }
        Ok(())
    }

    /// The interface writes files with mode 0644.
    fn set_modes(&mut self) -> Result<(), Failure> {
        let paths = std::mem::take(&mut self.executables);
        let Some(first) = paths.first() else {
            return Ok(());
        };
        let mut args = vec!["+x", "--"];
        args.extend(paths.iter().map(String::as_str));
        let request = ExecRequest {
            user: self.user.clone(),
            ..ExecRequest::new("chmod", &args)
        };
        let done = self.client.exec(&request, PER_FILE);
        let done = done.map_err(|why| self.failed(first, &why))?;
        if done.exit_code != 0 {
            let why = envd::guest_text(&String::from_utf8_lossy(&done.stderr));
            return Err(Failure::refused(format!(
                "cannot make {first} executable: {why}"
            )));
        }
        Ok(())
    }

    fn get_dir(&mut self, from: &str, to: &Path, depth: usize) -> Result<(), Failure> {
        check_depth(from, depth)?;
        match fs::create_dir(to) {
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists && is_real_dir(to) => {}
            made => made.map_err(|why| here(to, &why))?,
        }
        let request = ListDirRequest {
            path: from.to_owned(),
            depth: 1,
        };
        let method = "filesystem.Filesystem/ListDir";
        let listed = self.call::<ListDirResponse>(method, from, &request)?;
        for entry in listed.unwrap_or_default().entries {
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(Failure::refused(format!(
                    "{from} has more than {MAX_ENTRIES} entries"
                )));
            }
            let name = component(&entry.name)?;
            let (inside, path) = (join(from, name), to.join(name));
            match (entry.kind, &entry.symlink_target) {
                (FileType::Directory, None) => self.get_dir(&inside, &path, depth + 1)?,
                (FileType::File, _) => self.get_file(&inside, &path, entry.mode, entry.size)?,
                (FileType::Directory, Some(_)) | (FileType::Symlink | FileType::Unspecified, _) => {
                    skip(&inside)
                }
            }
        }
        Ok(())
    }

    /// A complete file replaces an existing one.
    fn get_file(&mut self, from: &str, to: &Path, mode: u32, size: i64) -> Result<(), Failure> {
        let target = Target::of(to).map_err(|why| here(to, &why))?;
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(nix::libc::O_NOFOLLOW);
        if let Target::Draft(_) = &target {
            options.create_new(true).mode(0o644 | (mode & EXECUTABLE));
        }
        let path = target.path(to);
        if let Target::Draft(draft) = &target {
            self.draft.is(Some(draft));
        }
        let file = options
            .open(path)
            .map_err(|why| here_not("write", to, &why))?;
        let user = self.user.clone();
        self.transfer.inc_length(u64::try_from(size).unwrap_or(0));
        let mut counted = self.transfer.wrap_write(file);
        let got = self.client.download(from, &mut counted, user.as_deref());
        drop(counted);
        let mut done = got
            .map(drop)
            .map_err(|why| self.not_copied("write", to, from, &why));
        if let Target::Draft(draft) = &target {
            done = done
                .and_then(|()| fs::rename(draft, to).map_err(|why| here_not("write", to, &why)));
            if done.is_err() {
                let _not_there = fs::remove_file(draft);
            }
            self.draft.is(None);
        }
        done?;
        self.files += 1;
        Ok(())
    }

    fn finish(self, context: &Context) -> Result<(), Failure> {
        let bytes = self.transfer.position();
        self.transfer.finish_and_clear();
        let item = json!({"files": self.files, "bytes": bytes});
        context.format.done("copy", &item, "")
    }
}

/// Destination of a download.
enum Target {
    /// A new file next to the target, renamed to the target at the end.
    Draft(PathBuf),
    /// The target itself, which exists and is not a file: a device or a pipe.
    Itself,
}

impl Target {
    fn of(to: &Path) -> io::Result<Self> {
        match fs::symlink_metadata(to) {
            Ok(found) if found.is_symlink() => Err(io::Error::other("it is a link")),
            Ok(found) if !found.is_file() => Ok(Self::Itself),
            Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
            Ok(_) | Err(_) => {
                let name = to.file_name().unwrap_or_default().to_string_lossy();
                let draft = format!(".{name}.cube-{}", std::process::id());
                Ok(Self::Draft(to.with_file_name(draft)))
            }
        }
    }

    fn path<'a>(&'a self, to: &'a Path) -> &'a Path {
        match self {
            Self::Draft(draft) => draft,
            Self::Itself => to,
        }
    }
}

fn is_real_dir(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

fn check_depth(path: &str, depth: usize) -> Result<(), Failure> {
    if depth <= MAX_DEPTH {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "{path} is more than {MAX_DEPTH} directories deep"
    )))
}

fn skip(path: &str) {
    let path = envd::guest_text(path);
    eprintln!("cube: skipping {path}: not a file or directory, or a link to a directory");
}

fn join(dir: &str, name: &str) -> String {
    match dir {
        "" => name.to_owned(),
        dir => format!("{}/{name}", dir.trim_end_matches('/')),
    }
}
