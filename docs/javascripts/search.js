// Two things that the theme's search, a worker, does not do by itself.
"use strict";

const Search = {
  // The index holds each Chinese character as a word: mkdocs.yml says so. The worker would take only some of
  // those of a query, so each is asked for, and must be there.
  query: (text) => text.replace(/[\u3400-\u9fff]/g, " +$& ").replace(/"/g, (quote) => (/[\u3400-\u9fff]/.test(text) ? " " : quote)),

  // What is sent to the worker, whose messages of type 2 are queries.
  message: (data) => (data?.type === 2 && typeof data.data === "string" ? { ...data, data: Search.query(data.data) } : data),
};

// Browsers start no worker from a file. In the site's folder, opened without a server, a hidden frame takes its
// place: it runs the same script, and messages become events. The theme's worker looks for this name.
if (typeof location !== "undefined" && location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><body>");
      inside.document.close();
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: source, onload: done, onerror: failed });
        inside.document.body.append(script);
      });
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.loaded = load(new URL(url, document.baseURI).href);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}

if (typeof Worker !== "undefined") {
  window.Worker = class extends Worker {
    postMessage(data, ...more) {
      super.postMessage(Search.message(data), ...more);
    }
  };
}
