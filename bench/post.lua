-- For wrk: POSTs that share one of 64 prefixes and differ at their end, all of the same length.
-- Arguments: the file with the body template, the path, the key, the first serial number.
local head, one, two, three, serial

function init(args)
  local file = assert(io.open(args[1], "rb"))
  local template = file:read("*a")
  file:close()
  one, two, three = template:match("^(.*)@GROUP@(.*)@SERIAL@(.*)$")
  serial = tonumber(args[4])
  local length = #one + 3 + #two + 10 + #three
  head = "POST " .. args[2] .. " HTTP/1.1\r\nHost: " .. wrk.headers["Host"]
    .. "\r\nAuthorization: Bearer " .. args[3] .. "\r\nAccept: application/json\r\nContent-Type: application/json\r\nContent-Length: " .. length .. "\r\n\r\n" .. one
end

function request()
  serial = serial + 1
  return string.format("%s%03d%s%010d%s", head, serial % 64, two, serial, three)
end

function done(summary, latency, requests)
  local e = summary.errors
  io.stderr:write(string.format(
    '{"requests":%d,"duration_us":%d,"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d,"p50_us":%d,"p99_us":%d}\n',
    summary.requests, summary.duration, e.connect, e.read, e.write, e.status, e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
