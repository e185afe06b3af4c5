//! The clocks of a server under test. A test can advance CLOCK_REALTIME and CLOCK_BOOTTIME as if the host had been
//! suspended, and set CLOCK_REALTIME alone. The monotonic clock, and so every timeout of the server's own work, is the host's.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tempfile::TempDir;

pub(crate) struct Clock {
    dir: TempDir,
    /// The seconds by which the server's clock is ahead of the host's.
    file: File,
    ahead_s: i64,
    /// By how many seconds the wall clock was set.
    set_s: i64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/clock.c");
        let compiled = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .arg(dir.path().join("clock.so"))
            .arg(source)
            .status()
            .unwrap();
        assert!(compiled.success(), "cc: {compiled}");
        fs::write(dir.path().join("ahead"), [0; 16]).unwrap();
        let file = File::options().write(true).open(dir.path().join("ahead"));
        Self {
            file: file.unwrap(),
            dir,
            ahead_s: 0,
            set_s: 0,
        }
    }

    /// A program that runs `cube-api` with these clocks. Static programs ignore them, among them `cube-vmm`.
    pub(crate) fn server(&self) -> PathBuf {
        let script = self.dir.path().join("cube-api");
        let dir = self.dir.path().display();
        let server = env!("CARGO_BIN_EXE_cube-api");
        let text = format!(
            "#!/bin/sh\nexec env LD_PRELOAD={dir}/clock.so CUBE_CLOCK={dir}/ahead {server} \"$@\"\n"
        );
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        script
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.ahead_s += i64::try_from(by.as_secs()).unwrap();
        self.file
            .write_all_at(&self.ahead_s.to_ne_bytes(), 0)
            .unwrap();
    }

    /// Sets the wall clock forward or back.
    pub(crate) fn set(&mut self, by_s: i64) {
        self.set_s += by_s;
        self.file
            .write_all_at(&self.set_s.to_ne_bytes(), 8)
            .unwrap();
    }

    /// The server's time since 1970, if its wall clock was not set.
    pub(crate) fn now(&self) -> Duration {
        let host = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        host + Duration::from_secs(self.ahead_s.unsigned_abs())
    }
}
