//! A server with hundreds of templates.

use std::{fs, path::Path, time::Instant};

use serde_json::{Value, json};

use crate::{process::Server, templates::start};

const TEMPLATES: usize = 300;
const LISTS: usize = 200;

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The directory in `parent` with this name, and in its record every `from` replaced by `to`. Other files are links.
fn copy(parent: &Path, name: &str, record: &str, changes: &[(&str, &str)], to: &str) {
    let (from, to) = (parent.join(name), parent.join(to));
    fs::create_dir(&to).unwrap();
    let mut text = fs::read_to_string(from.join(record)).unwrap();
    for (old, new) in changes {
        text = text.replace(old, new);
    }
    fs::write(to.join(record), text).unwrap();
    if let Ok(files) = fs::read_dir(from.join("image")) {
        fs::create_dir(to.join("image")).unwrap();
        for file in files {
            let file = file.unwrap();
            fs::hard_link(file.path(), to.join("image").join(file.file_name())).unwrap();
        }
    }
}

/// Makes the state directory have this many templates of builds, all with the files of the one that it has.
fn multiply(state: &Path, template: &str) {
    let (builds, pool) = (state.join("builds/templates"), state.join("templates"));
    let record = read(&builds.join(template).join("record.json"));
    let ready = &record["template"]["builds"][0];
    let build = ready["id"].as_str().unwrap();
    let made = ready["state"]["template"].as_str().unwrap();
    for n in 1..TEMPLATES {
        let name = format!("\"many-{n}");
        let (of_build, of_pool) = (format!("b{n:019}"), format!("p{n:019}"));
        let uuid = format!("{}{n:04x}", &build[..build.len() - 4]);
        let names = ("\"many-0", name.as_str());
        let changes = [
            (template, of_build.as_str()),
            (build, &uuid),
            (made, &of_pool),
            names,
        ];
        copy(&builds, template, "record.json", &changes, &of_build);
        copy(&pool, made, "template.json", &[names], &of_pool);
    }
}

pub(crate) fn kvm_hundreds_of_templates_are_listed_completely() {
    let mut server = Server::open();
    let build = start(&server, "many-0", &json!({}));
    build.is_ready();
    let template = build.template.clone();
    server.stop();
    multiply(server.state.path(), &template);
    server.restart();
    let mut times = Vec::new();
    let mut listed = Value::Null;
    for _ in 0..LISTS {
        let begun = Instant::now();
        let answer = server.get("/templates").expect(200);
        times.push(begun.elapsed());
        listed = answer.json();
    }
    times.sort_unstable();
    let quantile = |percent: usize| times[(LISTS * percent).div_ceil(100) - 1];
    println!(
        "a list of {TEMPLATES} templates (n = {LISTS}): P50 {:?} P95 {:?}",
        quantile(50),
        quantile(95)
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
    let mut wanted: Vec<_> = (0..TEMPLATES).map(|n| format!("many-{n}")).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    // Each of them is one that sandboxes start from.
    let sandbox = server.create(&json!({"templateID": "many-299"}));
    assert_eq!(server.sh(&sandbox, "echo here"), "here\n");
}
