#!/bin/sh
# A run that is killed three times, followed by a live page in Chromium; then pictures of the page.
#
#   tests/opt_in/seeing.sh [FOLDER FOR THE PICTURES]
#
# Without a folder docs/images/seeing.png is made again. Needs Debian's chromium and chromium-driver.
set -eu
cd "$(dirname "$0")/../.."

for tool in chromium chromedriver; do
    command -v "$tool" > /dev/null || {
        echo "seeing.sh: $tool is missing; apt-get install chromium chromium-driver" >&2
        exit 2
    }
done
exec "${PYTHON:-.venv/bin/python}" -m tests.opt_in.seeing "$@"
