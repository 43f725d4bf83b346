// Search runs in a worker, and browsers start none for pages that are opened from a folder: there
// the worker's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      const start = "window.postMessage = (data) => parent.postMessage({ fromFrame: data }, '*')"
      frame.srcdoc = `<script>${start}</script><script src="${url}"></script>`
      this.ready = new Promise((done) => frame.addEventListener("load", () => done(frame)))
      window.addEventListener("message", (event) => {
        if (event.source === frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data.fromFrame }))
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then((frame) => {
        const inside = frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      })
    }
  }
}
