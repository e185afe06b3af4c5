//! A server with hundreds of templates.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use model::Bytes;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use pool::{PoolConfig, TemplateDefaults};
use serde_json::{Value, json};
use stats::rank::nearest_rank;
use test_cases::found;

use crate::{
    archive::{file, image, pack},
    process::Server,
    quota::noise,
    served::requested,
    server,
    world::{PATIENCE, World, config, images, registries, run, sh, variable},
};

const TEMPLATES: usize = 300;
const LISTS: usize = 200;
/// Number of templates of distinct roots in the tier kvm.
const FEW: usize = 4;
const MEMORY: Bytes = Bytes::mib(256);
/// Space of inodes and directories in each root image: three blocks.
const INODES: usize = 3 * BLOCK;
const BLOCK: usize = 4096;
/// While an image is made, its layer and 64 MiB more are reserved. There is thus room for the last one and for no
/// other.
const BESIDES: usize = 72 << 20;
/// Number of templates from which sandboxes are created. The memory of each is made on the disk.
const CREATES: usize = 40;

/// Starts a server that has the installed template `base` only: the rebuild of another would take the time of the test.
fn open(installed: &Path) -> Server {
    let artifacts = variable("CUBE_ARTIFACTS");
    symlink(artifacts.join("templates/base"), installed.join("base")).unwrap();
    let [installed, images] = [installed, &artifacts].map(|path| path.to_str().unwrap());
    let mut options = vec!["--insecure-loopback", "--warm", "0:0"];
    options.extend(["--templates", installed, "--images", images]);
    Server::with(&options)
}

/// Builds a template with the disk of `base`, and returns its id.
fn build(server: &Server, name: &str) -> String {
    let request = json!({"name": name, "cpuCount": 2, "memoryMB": 256});
    let start = json!({"fromTemplate": "base", "steps": []});
    let status = requested(server, &request, &start);
    assert_eq!(status["status"], "ready", "{status}");
    status["templateID"].as_str().unwrap().to_owned()
}

/// Copies the record of a directory in `parent` to a new directory there, with every `from` replaced with `to`.
fn copy(parent: &Path, name: &str, record: &str, changes: &[(&str, &str)], to: &str) {
    let (from, to) = (parent.join(name), parent.join(to));
    fs::create_dir(&to).unwrap();
    let mut text = fs::read_to_string(from.join(record)).unwrap();
    for (old, new) in changes {
        text = text.replace(old, new);
    }
    fs::write(to.join(record), text).unwrap();
}

/// The records of the one build in a state directory.
struct First<'a> {
    state: &'a Path,
    template: &'a str,
    build: String,
    made: String,
}

impl<'a> First<'a> {
    fn of(state: &'a Path, template: &'a str) -> Self {
        let record = state.join("builds/templates").join(template);
        let record: Value =
            serde_json::from_slice(&fs::read(record.join("record.json")).unwrap()).unwrap();
        let ready = &record["template"]["builds"][0];
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        Self {
            state,
            template,
            build: text(&ready["id"]),
            made: text(&ready["state"]["template"]),
        }
    }

    /// Adds the record of a build `many-N` that made this template in the pool.
    fn add_build(&self, n: usize, made: &str) {
        let of_build = format!("b{n:019}");
        let uuid = format!("{}{n:04x}", &self.build[..self.build.len() - 4]);
        let name = format!("\"many-{n}");
        let changes = [
            (self.template, of_build.as_str()),
            (&self.build, &uuid),
            (&self.made, made),
            ("\"many-0", &name),
        ];
        let builds = self.state.join("builds/templates");
        copy(&builds, self.template, "record.json", &changes, &of_build);
    }

    /// Adds a template to the pool that has links of the files of the first.
    fn add_template(&self, n: usize) -> String {
        let pool = self.state.join("templates");
        let (id, name) = (format!("p{n:019}"), format!("\"many-{n}"));
        let changes = [("\"many-0", name.as_str())];
        copy(&pool, &self.made, "template.json", &changes, &id);
        let image = pool.join(&id).join("image");
        fs::create_dir(&image).unwrap();
        for file in fs::read_dir(pool.join(&self.made).join("image")).unwrap() {
            let file = file.unwrap();
            fs::hard_link(file.path(), image.join(file.file_name())).unwrap();
        }
        id
    }
}

fn print(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let [p50, p95] = [500, 950].map(|permille| nearest_rank(times, permille).unwrap());
    found!("{what} (n = {}): P50 {p50:?} P95 {p95:?}", times.len());
}

/// Lists the templates, and checks that all of `0..count` are there and ready. Prints the times.
fn list(server: &Server, count: usize) {
    let mut times = Vec::new();
    let mut listed = Value::Null;
    for _ in 0..LISTS {
        let begun = Instant::now();
        let answer = server.get("/templates").expect(200);
        times.push(begun.elapsed());
        listed = answer.json();
    }
    print(
        &format!("a list of {count} templates of builds"),
        &mut times,
    );
    let listed = listed.as_array().unwrap();
    let mut names: Vec<_> = listed
        .iter()
        .filter(|item| item["aliases"] != json!(["base"]) && item["buildStatus"] == "ready")
        .filter(|item| item["diskSizeMB"].as_u64() > Some(0) && item["memoryMB"] == 256)
        .map(|item| item["names"][0].as_str().unwrap_or_default().to_owned())
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut wanted: Vec<_> = (0..count).map(|n| format!("many-{n}")).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

pub(crate) fn kvm_hundreds_of_templates_are_listed_completely() {
    let installed = tempfile::tempdir().unwrap();
    let mut server = open(installed.path());
    let template = build(&server, "many-0");
    server.stop();
    let first = First::of(server.state.path(), &template);
    for n in 1..TEMPLATES {
        first.add_build(n, &first.add_template(n));
    }
    server.restart();
    list(&server, TEMPLATES);
    // Each of them is one that sandboxes start from.
    let sandbox = server.create(&json!({"templateID": "many-299"}));
    assert_eq!(server.sh(&sandbox, "echo here"), "here\n");
}

/// Waits until this many templates are stored as diffs only.
async fn until_stored(world: &World, state: &Path, count: usize) {
    let begun = Instant::now();
    let is_diff = |dir: &fs::DirEntry| {
        let has = |name: &str| dir.path().join("image").join(name).exists();
        has("memory.diff") && !has("memory") && !has("memory.old")
    };
    loop {
        let known = usize::try_from(world.pool.stats().await.memory_diffs).unwrap();
        let dirs = fs::read_dir(state.join("templates")).unwrap().flatten();
        let found = dirs.filter(is_diff).count();
        if known == count && found == known {
            return;
        }
        assert!(begun.elapsed() < PATIENCE * 2, "{known} of {count} diffs");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Size of the programs that every one of these root images gets.
fn programs() -> usize {
    let guest = variable("CUBE_ARTIFACTS").join("guest");
    let space = |name: &&str| {
        let size = fs::metadata(guest.join(name)).unwrap().len();
        usize::try_from(size).unwrap().next_multiple_of(BLOCK)
    };
    ["bash", "busybox"].iter().map(space).sum()
}

/// Makes templates `many-1` and so on, each from its own image, and waits until their memory and that of `many-0` is
/// stored as diffs. Returns their ids.
async fn publish(state: &Path, count: usize) -> Vec<String> {
    let registry = server::Server::default();
    let address = registry.start().await;
    let mut spec = images(registries(&[address]));
    // The images together are more than half of the quota.
    let noise_times = ((96 << 20) / (count - 1)).max(4 << 20).div_ceil(16 << 10);
    let layer = noise_times * (16 << 10);
    let quota = (count - 1) * (programs() + INODES + layer) + layer + BESIDES;
    let image_of = |n: usize| {
        let noise = noise(n as u64).repeat(noise_times);
        let files = [file("which", n.to_string()), file("noise", noise)];
        image(&[pack(&files)])
    };
    spec.quota = Bytes(quota as u64);
    let pool = PoolConfig {
        idle: Duration::from_secs(1),
        ..config(state)
    };
    let world = World::of_pool(pool, spec).await;
    let mut made = Vec::new();
    for n in 1..count {
        registry.add(&format!("r{n}"), &image_of(n));
        let base = world.ask(&format!("{address}/r{n}")).await;
        let disk = (world.pool).disk_of_size(&base.base().template, MEMORY, Bytes(0));
        let disk = disk.await.unwrap().id;
        let sandbox = world.create(&disk).await;
        sh(&sandbox, &format!("echo {n} | tee /dev/shm/of > /of")).await;
        let names = vec![format!("many-{n}")];
        let template = (world.pool).publish(&sandbox.id, names, TemplateDefaults::default());
        let template = template.await.unwrap().id;
        world.pool.kill(&sandbox.id).await.unwrap();
        world.pool.remove_template(&disk).await.unwrap();
        // As builds do.
        let sandbox = world.create(&template).await;
        sh(&sandbox, "true").await;
        world.pool.record_working_set(&sandbox.id).await.unwrap();
        world.pool.kill(&sandbox.id).await.unwrap();
        made.push(template);
        // The disk must never hold many complete memory files.
        if n % FEW == 0 {
            until_stored(&world, state, n + 1).await;
        }
    }
    until_stored(&world, state, count).await;
    // The quota of images counts the roots of all templates. It has removed what only new builds would use, and refuses
    // one more image.
    let kept = world.bases.templates().len();
    assert!(kept < count - 1, "{kept} templates of images");
    registry.add("more", &image_of(count));
    let refused = world.ask(&format!("{address}/more")).await;
    let why = refused.reason();
    assert!(why.contains("images.quota"), "{why}");
    world.close().await;
    made
}

/// Removes the files of all templates in a state directory from the page cache.
fn forget(state: &Path) {
    let images = fs::read_dir(state.join("images")).unwrap();
    let templates = fs::read_dir(state.join("templates")).unwrap();
    let templates = templates.map(|dir| dir.unwrap().path().join("image"));
    for dir in images.map(|dir| dir.unwrap().path()).chain(templates) {
        for file in fs::read_dir(dir).unwrap() {
            let file = File::open(file.unwrap().path()).unwrap();
            file.sync_data().unwrap();
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        }
    }
}

/// Creates a sandbox of `many-N`, which must have its disk and memory, and ends it. Returns the time of the create.
fn create(server: &Server, n: usize) -> Duration {
    forget(server.state.path());
    let begun = Instant::now();
    let sandbox = server.create(&json!({"templateID": format!("many-{n}")}));
    let took = begun.elapsed();
    // Of its root, of its memory, and of its disk.
    let found = server.sh(&sandbox, "cat /which; echo; cat /dev/shm/of /of");
    assert_eq!(found, format!("{n}\n{n}\n{n}\n"));
    server.delete(&sandbox.path("")).expect(204);
    took
}

/// Lists `count` templates of distinct roots, whose memory is stored as diffs, and creates sandboxes from some of them.
fn distinct_roots(count: usize) {
    let installed = tempfile::tempdir().unwrap();
    let mut server = open(installed.path());
    let template = build(&server, "many-0");
    server.stop();
    let state = server.state.path().to_owned();
    let made = run(publish(&state, count));
    let first = First::of(&state, &template);
    for (n, made) in (1..).zip(&made) {
        first.add_build(n, made);
    }
    server.restart();
    list(&server, count);
    let step = count.div_ceil(CREATES);
    let chosen: Vec<_> = (1..count).step_by(step).collect();
    let mut times: Vec<_> = chosen.iter().map(|n| create(&server, *n)).collect();
    print("a create that makes the memory from its diff", &mut times);
    let mut times: Vec<_> = chosen.iter().map(|n| create(&server, *n)).collect();
    print(
        "a create from files that are not in the page cache",
        &mut times,
    );

    // The quota counts the diffs, and refuses one more template without removing any.
    server.stop();
    server.restart_with(&["--template-quota", "1MiB"]);
    let sandbox = server.create(&json!({"templateID": "many-1"}));
    let refused = server.post(&sandbox.path("/snapshots"), &json!({}));
    let why = refused.expect(507).text();
    assert!(why.contains("pool.template_quota"), "{why}");
    list(&server, count);
}

pub(crate) fn kvm_templates_of_distinct_roots_are_listed_started_and_limited() {
    distinct_roots(FEW + 1);
}

pub(crate) fn soak_three_hundred_templates_of_distinct_roots() {
    distinct_roots(TEMPLATES);
}
