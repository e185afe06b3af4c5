"""Chromium in a sandbox, driven from here by Playwright: the DevTools protocol passes through the server's proxy.

    python browse.py                    the template gets Debian's Chromium by apt
    python browse.py --packages DIR     DIR/chromium has a Chromium and its libraries (`extract.mjs` takes them from the npm package
                                        @sparticuz/chromium): for servers whose builds reach no archive
"""

import argparse
import os

from e2b import Sandbox, Template, wait_for_port
from playwright.sync_api import sync_playwright

NAME = "browser"
PORT = 9222
PAGE = """<!doctype html><title>Served inside</title>
<h1>Count</h1><button onclick="this.textContent = Number(this.textContent) + 1">41</button>
"""

def template(packages: str | None) -> Template:
    if packages:
        begin = (
            Template(file_context_path=packages)
            .from_base_image()
            .set_user("root")
            .copy("chromium", "/opt/chromium")
        )
        chromium = "LD_LIBRARY_PATH=/opt/chromium/lib /opt/chromium/chromium"
    else:
        begin = Template().from_base_image().apt_install(["chromium", "fonts-dejavu-core"]).set_user("root")
        chromium = "/usr/bin/chromium"
    # A guest is the sandbox, and runs one user's pages: Chromium's own sandbox is off.
    options = f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-port={PORT} --user-data-dir=/tmp/profile"
    start = f"{chromium} {options} --remote-allow-origins='*' about:blank"
    # The browser runs when the template is made, so every sandbox begins with it.
    return begin.set_user("user").set_start_cmd(start, wait_for_port(PORT))


parser = argparse.ArgumentParser()
parser.add_argument("--packages")
Template.build(template(parser.parse_args().packages), NAME, memory_mb=1024)

with Sandbox.create(NAME, timeout=300) as sandbox:
    sandbox.files.write("/home/user/site/index.html", PAGE)
    sandbox.commands.run("cd /home/user/site && python3 -m http.server 8000 > /dev/null 2>&1", background=True)
    # As the SDK does, the sandbox and its port are named by headers, so no DNS entry is needed.
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.connect_over_cdp(os.environ["E2B_SANDBOX_URL"], headers=headers)
        page = browser.new_context().new_page()
        page.goto("http://127.0.0.1:8000/")
        page.get_by_role("button").click()
        print(page.title(), page.get_by_role("button").text_content())
        picture = page.screenshot()
        print("screenshot:", picture[:4], len(picture) > 1000)
        try:
            page.goto("http://192.0.2.1/", timeout=3000)
        except Exception as error:
            print("outside:", "ERR_" in str(error) or "Timeout" in str(error))
        browser.close()

# Prints:
# Served inside 42
# screenshot: b'\x89PNG' True
# outside: True
