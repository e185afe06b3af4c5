//! Templates of real guests, from the artifacts of `cargo xtask prepare` (`CUBE_ARTIFACTS`, `CUBE_BIN`).

use std::{
    env,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use envd::{ENVD_PORT, EnvdClient, ExecRequest};
use model::{Bytes, GuestPaths, RestoreSpec, WorkingSetPrefault, template_file};
use template::{BuildError, Builder, Cause, Limits, Quiet, Recipe, Report, Step, Work, files_of};
use test_cases::cases;
use vmm_control::{VmProcess, fresh_identity};

const PATIENCE: Duration = Duration::from_secs(60);

fn variable(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_default())
}

fn lack(_: &'static str) -> Option<String> {
    if let Err(e) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("/dev/kvm cannot be opened: {e}"));
    }
    let needed = [
        variable("CUBE_ARTIFACTS").join("guest/base.erofs"),
        variable("CUBE_BIN").join("cube-vmm"),
    ];
    let missing = needed.iter().find(|path| !path.exists())?;
    Some(format!(
        "{} is missing (run `cargo xtask test`)",
        missing.display()
    ))
}

fn main() -> ExitCode {
    let cases = cases! {
        tests::{
            kvm_a_template_is_built_and_its_recipe_builds_it_again,
            kvm_a_failed_step_is_named_with_its_reason,
            kvm_a_guest_that_is_never_quiet_is_reported_with_its_process,
            kvm_a_build_that_is_stopped_leaves_no_vm,
        },
    };
    test_cases::run(cases, lack).exit_code()
}

fn recipe() -> Recipe {
    let guest = variable("CUBE_ARTIFACTS").join("guest");
    let paths = GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join("initramfs.cpio"),
        root: guest.join("base.erofs"),
        layer: guest.join("layer.ext4"),
    };
    Recipe {
        first: vec![Work::run(&["/bin/true"])],
        ..Recipe::of(&paths, Bytes::mib(256)).expect("the guest's files")
    }
}

/// Builds a template in `dir/NAME`.
fn build(dir: &Path, name: &str, recipe: &Recipe) -> Result<Report, BuildError> {
    build_with(dir, name, recipe, Limits::default(), &|_| Ok(()))
}

fn build_with(
    dir: &Path,
    name: &str,
    recipe: &Recipe,
    limits: Limits,
    on_vmm: &dyn Fn(u32) -> io::Result<()>,
) -> Result<Report, BuildError> {
    let builder = Builder {
        vmm: &variable("CUBE_BIN").join("cube-vmm"),
        run: dir,
        log: &dir.join("log"),
        limits,
    };
    let files = dir.join("files");
    let files = files.is_dir().then_some(files.as_path());
    builder.build(recipe, files, &dir.join(name), on_vmm)
}

/// Runs a command in a clone of the template in `dir/NAME`, and returns its output.
fn in_clone(dir: &Path, name: &str, command: &str) -> String {
    let vmm = variable("CUBE_BIN").join("cube-vmm");
    let mut vm = VmProcess::spawn(&vmm, None, Some(PATIENCE)).expect("a VMM");
    let vsock = dir.join("clone.sock");
    let spec = RestoreSpec {
        template: dir.join(name),
        base: None,
        root: None,
        vsock: vsock.clone(),
        console: None,
        layer_limit: None,
        prefault: WorkingSetPrefault::On,
    };
    vm.control.restore(spec, None).expect("a clone");
    vm.control.resume().expect("a running clone");
    let identity = fresh_identity("clone").expect("an identity");
    vm.control.identity(identity, PATIENCE).expect("an agent");
    let mut agent = EnvdClient::connect(&vsock, ENVD_PORT, PATIENCE).expect("an agent");
    let request = ExecRequest::new("/bin/sh", &["-c", command]);
    let output = agent.exec(&request, PATIENCE).expect("an output");
    vm.control.shutdown().expect("an end");
    String::from_utf8(output.stdout).expect("UTF-8")
}

mod tests {
    use super::*;

    pub(super) fn kvm_a_template_is_built_and_its_recipe_builds_it_again() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let dir = dir.path();
        let files = dir.join("files/opt/app");
        fs::create_dir_all(&files).expect("a directory");
        fs::write(files.join("value"), "from a file").expect("a file");
        let recipe = Recipe {
            setup: vec![Work::run_as_root(&[
                "/bin/cp",
                "/opt/app/value",
                "/opt/app/copy",
            ])],
            start: [
                "/bin/sh",
                "-c",
                "echo started >/dev/shm/state; exec sleep 1000000",
            ]
            .map(str::to_owned)
            .to_vec(),
            ready: Some(Work::run(&["/usr/bin/test", "-s", "/dev/shm/state"])),
            ..recipe()
        };
        let report = build(dir, "first", &recipe).expect("a template");
        assert!(matches!(report.quiet, Quiet::After(_)), "{}", report.quiet);
        let first = dir.join("first");
        let seen = "cat /opt/app/copy /dev/shm/state; pidof sleep >/dev/null && echo runs";
        assert_eq!(in_clone(dir, "first", seen), "from a filestarted\nruns\n");
        assert!(first.join(template_file::WORKING_SET).is_file());

        // The template alone is sufficient to build it again.
        let recorded = Recipe::read(&first).expect("a recipe").expect("a recipe");
        assert_eq!(recorded, recipe);
        let kept = files_of(&first).expect("the files");
        fs::remove_dir_all(dir.join("files")).expect("a removal");
        fs::rename(kept, dir.join("files")).expect("a rename");
        build(dir, "second", &recorded).expect("a template");
        assert_eq!(in_clone(dir, "second", seen), "from a filestarted\nruns\n");
    }

    pub(super) fn kvm_a_failed_step_is_named_with_its_reason() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let dir = dir.path();
        let fails = ["/bin/sh", "-c", "echo the reason >&2; exit 3"];
        let run = Work::run_as_root(&fails);
        let short = Limits {
            work: Duration::from_secs(2),
            ..Limits::default()
        };
        let never = Work::run(&["/bin/false"]);
        let cases = [
            (
                Step::Setup,
                "exit status 3: the reason",
                Recipe {
                    setup: vec![run.clone()],
                    ..recipe()
                },
            ),
            (
                Step::WarmUp,
                "exit status 3: the reason",
                Recipe {
                    warm_up: vec![run.clone()],
                    ..recipe()
                },
            ),
            (
                Step::FirstWork,
                "exit status 3: the reason",
                Recipe {
                    first: vec![run],
                    ..recipe()
                },
            ),
            (
                Step::Start,
                "exit status 3: the reason",
                Recipe {
                    start: fails.map(str::to_owned).to_vec(),
                    ready: Some(never.clone()),
                    ..recipe()
                },
            ),
            (
                Step::Ready,
                "the guest was not ready within 2s: /bin/false failed",
                Recipe {
                    ready: Some(never),
                    ..recipe()
                },
            ),
        ];
        for (number, (step, why, recipe)) in cases.into_iter().enumerate() {
            let name = format!("t{number}");
            let error = build_with(dir, &name, &recipe, short, &|_| Ok(())).expect_err("a failure");
            assert_eq!(error.step, step);
            let chain = model::chain(&error);
            assert!(chain.contains(why), "{chain}");
            // A clone prints nothing.
            assert!(
                step == Step::FirstWork || !error.console.is_empty(),
                "{step}"
            );
            assert!(!dir.join(name).join("recipe.json").exists());
        }
    }

    pub(super) fn kvm_a_guest_that_is_never_quiet_is_reported_with_its_process() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let program = "cp /bin/dash /tmp/spinning; exec /tmp/spinning -c 'while :; do :; done'";
        let recipe = Recipe {
            start: ["/bin/sh", "-c", program].map(str::to_owned).to_vec(),
            ready: Some(Work::run(&["/usr/bin/pgrep", "spinning"])),
            ..recipe()
        };
        let report = build(dir.path(), "busy", &recipe).expect("a template");
        let text = report.quiet.to_string();
        assert!(text.contains("(spinning) uses the CPU"), "{text}");
    }

    pub(super) fn kvm_a_build_that_is_stopped_leaves_no_vm() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let pids = std::sync::Mutex::new(Vec::new());
        let on_vmm = |pid| {
            pids.lock().expect("the pids").push(pid);
            Err(io::Error::other("by the caller"))
        };
        let error = build_with(dir.path(), "t", &recipe(), Limits::default(), &on_vmm);
        let error = error.expect_err("a failure");
        assert!(matches!(error.cause, Cause::Stopped(_)), "{error:?}");
        for pid in pids.into_inner().expect("the pids") {
            assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} runs");
        }
    }
}
