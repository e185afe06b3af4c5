//! A VM whose root is a converted image.

use std::{
    env, fs,
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest};
use model::{Bytes, GuestPaths, HypercallPath, VmSpec};
use vmm_control::{VmProcess, fresh_identity};

/// Time limit for each response of the VMM or the agent.
const PATIENCE: Duration = Duration::from_secs(120);

/// The requirement that this host lacks. `None` if the tests can run.
pub(crate) fn lack(_test: &str) -> Option<String> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("cannot open /dev/kvm: {error}"));
    }
    if !nix::unistd::geteuid().is_root() {
        return Some("this test needs root".to_owned());
    }
    let needed = [vmm(), artifact("vmlinux"), artifact("busybox")];
    let missing = needed.iter().find(|path| !path.exists())?;
    Some(format!(
        "{} is missing (run `cargo xtask test`)",
        missing.display()
    ))
}

/// A file of `target/cube/guest`.
pub(crate) fn artifact(name: &str) -> PathBuf {
    let artifacts = PathBuf::from(env::var_os("CUBE_ARTIFACTS").unwrap_or_default());
    artifacts.join("guest").join(name)
}

fn vmm() -> PathBuf {
    PathBuf::from(env::var_os("CUBE_BIN").unwrap_or_default()).join("cube-vmm")
}

/// A running guest. Its VMM ends when this value is dropped.
pub(crate) struct Guest {
    _vm: VmProcess,
    dir: PathBuf,
}

impl Guest {
    /// Boots a root image. `dir` receives sockets and the console.
    pub(crate) fn boot(root: &Path, dir: &Path) -> Self {
        let log = File::create(dir.join("log")).unwrap();
        let mut vm = VmProcess::spawn(&vmm(), Some(log), Some(PATIENCE)).unwrap();
        let spec = VmSpec {
            memory: Bytes::mib(256),
            vcpus: 1,
            guest: GuestPaths {
                kernel: artifact("vmlinux"),
                initrd: artifact("initramfs.cpio"),
                root: root.to_owned(),
                layer: artifact("layer.ext4"),
            },
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: dir.join("vsock"),
            console: Some(dir.join("console")),
            layer_limit: None,
        };
        vm.control.boot(spec, None).unwrap();
        let identity = fresh_identity("image").unwrap();
        let known = vm.control.identity(identity, PATIENCE);
        let guest = Self {
            _vm: vm,
            dir: dir.to_owned(),
        };
        assert!(known.is_ok(), "{known:?}\n{}", guest.console());
        guest
    }

    fn console(&self) -> String {
        let console = fs::read(self.dir.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&console).into_owned()
    }

    pub(crate) fn agent(&self) -> EnvdClient {
        EnvdClient::connect(&self.dir.join("vsock"), ENVD_PORT, PATIENCE).unwrap()
    }

    pub(crate) fn exec(&self, user: Option<&str>, program: &str, args: &[&str]) -> ExecOutput {
        let request = ExecRequest {
            user: user.map(str::to_owned),
            ..ExecRequest::new(program, args)
        };
        self.agent()
            .exec(&request, PATIENCE)
            .unwrap_or_else(|error| panic!("{program} {args:?}: {error}\n{}", self.console()))
    }

    /// Runs a command as E2B's SDKs do. Returns its output without the final newline.
    pub(crate) fn sh(&self, user: Option<&str>, script: &str) -> String {
        let out = self.exec(user, "/bin/bash", &["-l", "-c", script]);
        let error = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.exit_code, 0, "{script}: {}: {error}", out.status);
        String::from_utf8_lossy(&out.stdout).trim_end().to_owned()
    }
}
