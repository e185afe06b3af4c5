//! A power loss at any moment of builds: the system calls of a server are recorded while a client builds templates, and
//! a server starts on every state in which a crash can leave the state directory (see the crate `power-loss`).

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::{self, File},
    io::Write,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use api::{
    auth::Auth,
    serve::{BuildsSpec, ServeSpec},
};
use builds::{record::TemplateRecord, store};
use model::{Bytes, template_file};
use nix::sys::signal::{Signal, raise};
use power_loss::{Crash, Recording, TRACED, Tree};
use serde_json::{Value, json};

use crate::{
    archive::{file, image, pack},
    http::{self, Answer},
    process::JSON,
    registry::Registry,
    world::{config, images, registries, variable},
};

/// Makes this program the recorded server and its client; the value is the state directory.
pub(crate) const RECORDED: &str = "CUBE_TEST_BUILDS";
/// Set together with [`RECORDED`]: the file of the marks, the directory of small files, and the address of the registry.
const MARKS: &str = "CUBE_TEST_BUILDS_MARKS";
const SMALL: &str = "CUBE_TEST_BUILDS_SMALL";
const REGISTRY: &str = "CUBE_TEST_BUILDS_REGISTRY";
/// Tries all states, and omits each sync.
const ALL: &str = "CUBE_TEST_BUILDS_ALL";
const RECIPE: &str = "recipe.json";
/// How long a server may take to clean up after a crash.
const SETTLES: Duration = Duration::from_secs(20);
/// Files whose syncs must each be noticed if omitted, because they keep a promise.
const PROMISED: [&str; 4] = ["template.json", "record.json", "layers.json", "working-set"];

pub(crate) fn kvm_a_power_loss_leaves_the_builds_that_were_answered() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small");
    small_files(&small);
    let registry = Registry::start(dir.path(), "");
    registry.push(&image(&[pack(&[file("a", "1")])]));
    // The pool cannot link files from another file system, so all of its files are in the recording.
    let memory = tempfile::Builder::new()
        .prefix("cb")
        .tempdir_in("/dev/shm")
        .unwrap();
    let state = memory.path().join("s");
    let (marks, trace) = (dir.path().join("marks"), dir.path().join("trace"));
    let status = Command::new("strace")
        .args(TRACED)
        .arg("-o")
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .env(RECORDED, &state)
        .env(MARKS, &marks)
        .env(SMALL, &small)
        .env(REGISTRY, registry.address.to_string())
        .status()
        .expect("strace: apt-get install strace");
    assert!(status.success(), "the recorded server: {status}");
    let text = without_bulk(&fs::read_to_string(&trace).unwrap(), &state);
    let recording = Recording::new(&text, &state, &marks).unwrap();
    // Records of disks name root images by absolute paths, so each replay has the path of the recorded server.
    fs::remove_dir_all(&state).unwrap();
    let mut check = Check::new(&recording, state, small);
    let crashes = recording.crashes().len();
    println!("{crashes} states, {:#?}", recording.marks(usize::MAX));
    assert_eq!(check.broken(&recording), None);
    println!("{} different states", check.seen.len());
    check.every_sync_is_needed(&recording);
}

/// A small VMM, and `base` without its maker: the pool copies a VMM, and strace records short writes. The recipe names
/// the empty layer and a missing kernel, because otherwise each of the many servers would start to rebuild `base`.
fn small_files(dir: &Path) {
    let base = dir.join("installed/base");
    fs::create_dir_all(&base).unwrap();
    let vmm = format!(
        "#!/bin/sh\nexec {} \"$@\"\n",
        variable("CUBE_BIN").join("cube-vmm").display()
    );
    fs::write(dir.join("vmm"), vmm).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(dir.join("vmm"), mode).unwrap();
    for entry in fs::read_dir(variable("CUBE_ARTIFACTS").join("templates/base")).unwrap() {
        let (name, path) = entry.map(|e| (e.file_name(), e.path())).unwrap();
        if name == RECIPE {
            let mut recipe: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
            recipe["kernel"]["path"] = "/gone".into();
            fs::write(base.join(name), recipe.to_string()).unwrap();
        } else if name != template_file::MADE_BY && name != "cube-vmm" {
            std::os::unix::fs::symlink(path, base.join(name)).unwrap();
        }
    }
}

/// The trace without sandboxes and their events, which no build makes promises about, and without the contents of
/// disks.
fn without_bulk(trace: &str, state: &Path) -> String {
    let hex = |text: &str| -> String { text.bytes().map(|b| format!("\\x{b:02x}")).collect() };
    let sandboxes = hex(&format!("{}/sandboxes", state.display()));
    let events = hex(&format!("{}/events", state.display()));
    let layer = format!("{}>", hex("/layer"));
    let mut skipped = HashSet::new();
    let is_kept = |line: &&str| {
        let (pid, call) = line.split_once(' ').unwrap_or_default();
        let call = call.trim_start();
        if call.starts_with("<... ") {
            return !skipped.remove(pid);
        }
        let is_contents = call.starts_with("write(") || call.starts_with("pwrite64(");
        let is_of_others = call.contains(&sandboxes) || call.contains(&events);
        let drop = is_of_others || is_contents && call.contains(&layer);
        if drop && call.ends_with("<unfinished ...>") {
            skipped.insert(pid.to_owned());
        }
        !drop
    };
    let kept: Vec<_> = trace.lines().filter(is_kept).collect();
    kept.join("\n")
}

fn spec(state: &Path, small: &Path, registry: Option<SocketAddr>) -> ServeSpec {
    let free = TcpListener::bind(("127.0.0.1", 0))
        .unwrap()
        .local_addr()
        .unwrap();
    let mut pool = config(small);
    pool.installed_templates = Some(small.join("installed"));
    (pool.vmm, pool.state) = (small.join("vmm"), state.to_owned());
    ServeSpec {
        node: "a".to_owned(),
        cluster: None,
        listen: vec![free],
        bound: Vec::new(),
        pool,
        domain: None,
        trusted_proxies: Vec::new(),
        tls: None,
        auth: Auth::Open,
        max_timeout_s: 3600,
        on_exit: pool::OnClose::Kill,
        network: None,
        builds: BuildsSpec {
            cache_quota: Bytes::mib(4096),
            egress: netisolation::DefaultEgress::Deny,
            running: 1,
            upload_quota: Bytes::mib(64),
        },
        webhooks_forbidden: netisolation::ForbiddenAddresses::default(),
        reports: None,
        secrets_key: api::secrets::KeySource::Generated,
        images: images(registries(&Vec::from_iter(registry))),
    }
}

/// Serves in this process, on a runtime that ends with `client`.
fn serve<T>(spec: ServeSpec, client: impl FnOnce(SocketAddr) -> T) -> Result<T, String> {
    let address = spec.listen[0];
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let server = runtime.spawn(async move { api::serve::run(spec, None).await });
    let answers = || {
        let health = http::try_send(address, "GET", "/health", &[], b"");
        health.is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200"))
    };
    let begun = Instant::now();
    while !answers() {
        if server.is_finished() {
            return Err(format!("no server: {:?}", runtime.block_on(server)));
        }
        assert!(
            begun.elapsed() < crate::world::PATIENCE,
            "the server does not answer"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let done = client(address);
    raise(Signal::SIGTERM).unwrap();
    runtime.block_on(server).unwrap().unwrap();
    Ok(done)
}

fn get(address: SocketAddr, path: &str) -> Answer {
    http::send(address, "GET", path, &[], b"")
}

/// The recorded server, and what its client does.
pub(crate) fn be_recorded(state: &Path) {
    let marks = File::create(variable(MARKS)).unwrap();
    let mark = |text: String| (&marks).write_all(format!("{text}\n").as_bytes()).unwrap();
    let registry: SocketAddr = std::env::var(REGISTRY).unwrap().parse().unwrap();
    private_dir(state);
    let spec = spec(state, &variable(SMALL), Some(registry));
    let client = |address: SocketAddr| {
        let post = |path: &str, body: Value| {
            http::send(address, "POST", path, &JSON, body.to_string().as_bytes())
        };
        mark("checkpoint".into());
        let build = |name: &str, command: &str, is_uploaded: bool| {
            let body = json!({"name": name, "memoryMB": 256});
            let answer = post("/v3/templates", body).expect(202).json();
            let text = |key: &str| answer[key].as_str().unwrap().to_owned();
            let (template, build) = (text("templateID"), text("buildID"));
            mark(format!("requested {template} {build}"));
            if is_uploaded {
                let path = format!("/templates/{template}/files/{}", "0a".repeat(32));
                let grant = get(address, &path).expect(201).json();
                let url = grant["url"].as_str().unwrap();
                let target = &url[url.find("/templates/").unwrap()..];
                http::send(address, "PUT", target, &[], b"an archive").expect(200);
                mark(format!("uploaded {template}"));
            }
            let steps = json!([{"type": "RUN", "args": [command]}]);
            let path = format!("/templates/{template}/builds/{build}");
            let options = json!({"fromImage": format!("{registry}/r"), "steps": steps});
            post(&format!("/v2{path}"), options).expect(202);
            let begun = Instant::now();
            loop {
                let status = get(address, &format!("{path}/status?logsOffset=0"))
                    .expect(200)
                    .json();
                match status["status"].as_str() {
                    Some("ready") => break,
                    Some("waiting" | "building") => {}
                    _ => panic!("{status}"),
                }
                assert!(begun.elapsed() < crate::world::PATIENCE * 2, "{status}");
                std::thread::sleep(Duration::from_millis(20));
            }
            mark(format!("ready {template} {build}"));
            mark("checkpoint".into());
            template
        };
        let template = build("one", "echo 1 > /home/user/one", true);
        let tags = json!({"target": "one", "tags": ["two"]});
        post("/templates/tags", tags).expect(201);
        mark(format!("tagged {template} two"));
        mark("checkpoint".into());
        build("one", "echo 2 > /home/user/two", false);
        // The previous build loses its last tag and its template.
        let tags = json!({"name": "one", "tags": ["two"]}).to_string();
        mark(format!("untagging {template}"));
        http::send(address, "DELETE", "/templates/tags", &JSON, tags.as_bytes()).expect(204);
        mark(format!("untagged {template} two"));
        mark(format!("removing {template}"));
        http::send(
            address,
            "DELETE",
            &format!("/templates/{template}"),
            &[],
            b"",
        )
        .expect(204);
        mark(format!("removed {template}"));
    };
    serve(spec, client).unwrap();
}

/// State found by a server.
#[derive(Clone, Debug, Default)]
struct Found {
    /// The statuses of builds, by template and build.
    builds: BTreeMap<(String, String), String>,
    tags: BTreeMap<String, BTreeSet<String>>,
    /// The ids in the pool of builds that a tag refers to.
    needed: BTreeSet<String>,
    /// Templates of the pool and their files; directories without a record have none.
    templates: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Archives.
    uploads: Vec<Vec<u8>>,
    /// Ids in the pool of builds whose settings are known.
    finished: BTreeSet<String>,
    /// Disks in the indexes of steps and of images that the pool does not have.
    lost: BTreeSet<String>,
    /// Unreferenced templates, and incomplete files.
    left: BTreeSet<String>,
}

/// One state per moment, varying from moment to moment, so that a run takes a minute. All states if [`ALL`] is set.
fn tried(crashes: Vec<Crash>) -> Vec<Crash> {
    if std::env::var_os(ALL).is_some() {
        return crashes;
    }
    let moments = crashes.chunk_by(|a, b| a.at == b.at);
    let chosen = moments.map(|all| &all[all[0].at % all.len()]);
    chosen.cloned().collect()
}

struct Check {
    /// The directory of all replays, one after the other.
    state: PathBuf,
    small: PathBuf,
    seen: BTreeMap<Tree, Result<Found, String>>,
    /// The complete contents of the files of templates, by path.
    whole: BTreeMap<PathBuf, Vec<u8>>,
}

impl Check {
    fn new(recording: &Recording, state: PathBuf, small: PathBuf) -> Self {
        let mut whole: BTreeMap<PathBuf, Vec<u8>> = BTreeMap::new();
        for crash in recording.crashes() {
            for dir in crash.tree.dirs().filter(|dir| dir.ends_with("image")) {
                for (name, bytes) in crash.tree.files(dir) {
                    let known = whole.entry(dir.join(name)).or_default();
                    // Lost content is replaced by zeros of the same length (crate `power-loss`).
                    let is_longer = bytes.len() > known.len() || known.iter().all(|b| *b == 0);
                    if is_longer {
                        *known = bytes;
                    }
                }
            }
        }
        Self {
            state,
            small,
            seen: BTreeMap::new(),
            whole,
        }
    }

    /// The first promise that a crash breaks.
    fn broken(&mut self, recording: &Recording) -> Option<String> {
        tried(recording.crashes()).into_iter().find_map(|crash| {
            let marks = recording.marks(crash.at);
            let verdict = self
                .found(&crash.tree)
                .and_then(|found| self.verdict(&marks, &found));
            verdict
                .err()
                .map(|why| format!("after {marks:?}: {why}\n{}", crash.tree))
        })
    }

    fn found(&mut self, tree: &Tree) -> Result<Found, String> {
        if let Some(found) = self.seen.get(tree) {
            return found.clone();
        }
        private_dir(&self.state);
        tree.write(&self.state, |_, bytes| bytes.to_vec()).unwrap();
        let spec = spec(&self.state, &self.small, None);
        let found = serve(spec, |address| find(&self.state, address)).flatten();
        fs::remove_dir_all(&self.state).unwrap();
        self.seen.insert(tree.clone(), found.clone());
        found
    }

    fn verdict(&self, marks: &[&str], found: &Found) -> Result<(), String> {
        for (id, files) in &found.templates {
            let image = Path::new("templates").join(id).join("image");
            let is_whole = |(name, bytes): (&String, &Vec<u8>)| {
                self.whole.get(&image.join(name)) == Some(bytes)
            };
            if files.is_empty() || !files.iter().all(is_whole) {
                return Err(format!("template {id} of the pool is incomplete"));
            }
        }
        for id in &found.needed {
            if !found.templates.contains_key(id) {
                return Err(format!("a ready build has no template {id} in the pool"));
            }
            if !found.finished.contains(id) {
                return Err(format!("the settings of the template {id} are lost"));
            }
        }
        if let Some(id) = found.lost.first() {
            return Err(format!("an index names {id}, which the pool does not have"));
        }
        if !found.left.is_empty() {
            return Err(format!("left: {:?}", found.left));
        }
        if let Some(archive) = found.uploads.iter().find(|bytes| *bytes != b"an archive") {
            return Err(format!("an archive is torn: {archive:?}"));
        }
        let has = |begin: &str| marks.iter().any(|mark| mark.starts_with(begin));
        let (is_removing, is_untagging) = (has("removing"), has("untagging"));
        for mark in marks {
            let mut words = mark.split(' ');
            let mut word = || words.next().unwrap_or_default().to_owned();
            let (what, template, rest) = (word(), word(), word());
            let status = found
                .builds
                .get(&(template.clone(), rest.clone()))
                .map(String::as_str);
            let kept = match what.as_str() {
                "removed" => !found.tags.contains_key(&template),
                _ if is_removing => true,
                "untagged" => {
                    let tags = found.tags.get(&template);
                    tags.is_some_and(|tags| !tags.contains(&rest))
                }
                _ if is_untagging && what == "tagged" => true,
                "requested" => status.is_some(),
                "ready" => status == Some("ready"),
                "tagged" => found
                    .tags
                    .get(&template)
                    .is_some_and(|tags| tags.contains(&rest)),
                _ => true,
            };
            if !kept {
                return Err(format!("{mark}: {:?} {:?}", found.builds, found.tags));
            }
        }
        Ok(())
    }

    /// Omits all syncs of each [`PROMISED`] file in turn, or of every path. Those of promised files must be noticed.
    fn every_sync_is_needed(&mut self, recording: &Recording) {
        let is_promised = |kind: &str| PROMISED.iter().any(|name| kind.contains(name));
        let mut kinds: BTreeMap<_, Recording> = BTreeMap::new();
        for (number, path) in recording.syncs() {
            let kind = kind_of(path);
            if is_promised(&kind) || std::env::var_os(ALL).is_some() {
                let less = kinds.entry(kind).or_insert_with(|| recording.clone());
                *less = less.without(number);
            }
        }
        let mut unnoticed = Vec::new();
        for (kind, less) in kinds {
            let broken = self.broken(&less);
            let line = broken.as_deref().and_then(|why| why.lines().next());
            println!("without {kind}: {}", line.unwrap_or("nothing is noticed"));
            if broken.is_none() && is_promised(&kind) {
                unnoticed.push(kind);
            }
        }
        assert!(
            unnoticed.is_empty(),
            "superfluous, or not tested: {unnoticed:#?}"
        );
    }
}

/// A path with ids and digests replaced.
fn kind_of(path: &Path) -> String {
    let is_id = |word: &str| word.len() >= 16 && !word.contains(['_', '.']);
    let words = path.iter().map(|word| {
        let word = word.to_string_lossy();
        if is_id(&word) {
            "ID".to_owned()
        } else {
            word.into_owned()
        }
    });
    words.collect::<Vec<_>>().join("/")
}

/// Asks a server that has started after a crash, once it has removed what it does not need.
fn find(state: &Path, address: SocketAddr) -> Result<Found, String> {
    let begun = Instant::now();
    loop {
        let found = look(state, address)?;
        if found.left.is_empty() || begun.elapsed() > SETTLES {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn look(state: &Path, address: SocketAddr) -> Result<Found, String> {
    let mut found = Found::default();
    get(address, "/templates").expect(200);
    for dir in below(&state.join("builds/templates")) {
        let record = fs::read(dir.join("record.json")).map_err(|why| why.to_string())?;
        let record = store::parse(&record).map_err(|why| why.to_string())?;
        found.add_record(&record, address);
    }
    for dir in below(&state.join("templates")) {
        let id = name_of(&dir);
        if dir.join("template.json").exists() {
            // An unneeded template may be removed in the meantime.
            let files = below(&dir.join("image")).into_iter();
            let files = files.filter_map(|path| Some((name_of(&path), fs::read(path).ok()?)));
            found.templates.insert(id, files.collect());
        } else {
            found.left.insert(format!("templates/{id}"));
        }
    }
    for template in below(&state.join("builds/files")) {
        let archives = below(&template).into_iter();
        found
            .uploads
            .extend(archives.filter_map(|path| fs::read(path).ok()));
    }
    found.read_indexes(state);
    for dir in ["", "images", "vmms", "templates", "builds/images"] {
        let names = below(&state.join(dir))
            .into_iter()
            .map(|path| name_of(&path));
        let drafts = names.filter(|name| name.starts_with(".new-"));
        found
            .left
            .extend(drafts.map(|name| format!("{dir}/{name}")));
    }
    for draft in below(&state.join("builds/images/drafts")) {
        found.left.insert(draft.display().to_string());
    }
    Ok(found)
}

impl Found {
    fn add_record(&mut self, record: &TemplateRecord, address: SocketAddr) {
        let tags = get(address, &format!("/templates/{}/tags", record.id))
            .expect(200)
            .json();
        let tags = tags.as_array().unwrap().iter();
        let tags = tags.map(|tag| tag["tag"].as_str().unwrap().to_owned());
        self.tags.insert(record.id.clone(), tags.collect());
        for build in &record.builds {
            let path = format!("/templates/{}/builds/{}/status", record.id, build.id);
            let answer = get(address, &path).expect(200).json();
            let mut status = answer["status"].as_str().unwrap().to_owned();
            // No build continues after a restart; one without steps waits for them.
            if status == "building" {
                self.left.insert(format!("building: {}", build.id));
            }
            let reason = answer["reason"]["message"].as_str().unwrap_or_default();
            if status == "error" && reason.is_empty() {
                status.push_str(" without a reason");
            }
            self.builds
                .insert((record.id.clone(), build.id.clone()), status);
        }
        let pool_ids = record
            .tags
            .keys()
            .filter_map(|tag| Some(record.tagged(tag)?.1.to_owned()));
        self.needed.extend(pool_ids);
    }

    /// Reads the entries of the indexes of steps and of images, and finds unreferenced templates.
    fn read_indexes(&mut self, state: &Path) {
        let index = |name: &str| -> Value {
            let bytes = fs::read(state.join("builds").join(name)).unwrap_or_default();
            serde_json::from_slice(&bytes).unwrap_or_default()
        };
        let entries = |index: &Value, key: &str| -> Vec<(String, Value)> {
            let entries = index[key].as_object().into_iter().flatten();
            entries.map(|(k, v)| (k.clone(), v.clone())).collect()
        };
        let (steps, images) = (index("layers.json"), index("images/images.json"));
        let finished = entries(&steps, "finished").into_iter();
        self.finished = finished.map(|(id, _)| id).collect();
        let steps = entries(&steps, "steps").into_iter();
        let steps = steps.filter(|(_, step)| step["has_disk"] == true);
        let disks = steps.map(|(_, step)| step["disk"].clone());
        let images = entries(&images, "images").into_iter();
        let named = disks.chain(images.map(|(_, image)| image["template"].clone()));
        let named = named.map(|id| id.as_str().unwrap().to_owned());
        let named: BTreeSet<_> = named.collect();
        let has = |id: &&String| self.templates.contains_key(*id);
        self.lost = named.iter().filter(|id| !has(id)).cloned().collect();
        let is_named = |id: &&String| named.contains(*id) || self.needed.contains(*id);
        let unnamed = self.templates.keys().filter(|id| !is_named(id));
        let unnamed: Vec<_> = unnamed.map(|id| format!("templates/{id}")).collect();
        self.left.extend(unnamed);
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn private_dir(dir: &Path) {
    let mut builder = fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir).unwrap();
}

fn below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
